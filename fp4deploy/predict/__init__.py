"""Prediction on a user's own images: any artefact in, masks, objects and overlays out.

predictor.py    an artefact as a function of an image: preprocessing, network, output at the image's own size
prediction.py   what was predicted for one image
palette.py      class colours; drawing classes over an image
sources.py      files, folders, patterns, stdin
video.py        video files and cameras, by OpenCV
volumes.py      volumes: NIfTI files in, masks on their grids out
write.py        masks, overlays, COCO JSON and the summary of many images
choose.py       the model to take where none was named
"""
