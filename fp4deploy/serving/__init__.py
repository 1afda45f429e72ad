"""A model repository of Triton Inference Server (the server; not the language of the kernels).

    repository.py     writes the folder: configurations, model files, labels
    preprocess.py     Python backend of the server: encoded image -> normalised tensor and original size
    postprocess.py    Python backend of the server: logits and original size -> indexed PNG

The two backends are copied into the repository and run inside the server, with numpy and pillow alone.
"""
