"""What servers and video pipelines need around an exported model: Triton Inference Server, DeepStream, Holoscan.

    repository.py     writes the folder: configurations, model files, labels
    preprocess.py     Python backend of the server: encoded image -> normalised tensor and original size
    postprocess.py    Python backend of the server: logits and original size -> indexed PNG
    packed_model.py   Python backend of the server: pixels -> masks or objects, by a packed network

    pipelines.py      writes the folder of a video pipeline: network from pixels, configuration, and one of
    segmentation_parser.cpp   class map to DeepStream's nvinfer
    holoscan_app.py   operators of Holoscan, connected

The backends are copied into the repository and run inside the server: two of them with numpy and pillow alone, and
that of a packed network with fp4deploy.
"""
