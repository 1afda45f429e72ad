"""Prediction on a user's own images: any artefact in, masks, objects and overlays out.

predictor.py    an artefact as a function of an image: output at the image's own size, tiles
pipeline.py     what is around a network: frames prepared, classes decided, overlapped on a GPU
prediction.py   what was predicted for one image
timing.py       how long each stage of that takes
decode.py       files to pixels, by Pillow or nvJPEG
sources.py      files, folders, patterns, stdin
video.py        video files and cameras, by OpenCV
volumes.py      volumes: NIfTI files in, masks on their grids out
write.py        masks, overlays, COCO JSON and the summary of many images
choose.py       the model to take where none was named
"""
