"""Train, export, build and measure convolutional networks in NVFP4 for Blackwell GPUs.

    import fp4deploy as fd

    fd.prepare(model, "nvfp4_qat")                             # fake-quantise a torch model in place, then train it
    fd.calibrate(model, batches)                               # static activation scales
    fd.fuse(model)                                             # on a GPU: quantisation inside the kernels around it
    fd.quantize(model, images, method="gptq")                  # NVFP4 without training
    fd.export_onnx(model, image, "net.onnx")                   # ONNX with FP4 Q/DQ nodes, compared with torch
    fd.export_checkpoint(checkpoint, "unet.onnx", data="data/coco")  # the same of a file of `fp4deploy train`
    fd.pack(checkpoint, "unet.fp4", data="data/coco")          # NVFP4 codes and scales for this project's kernels
    fd.compile(model, image)(image)                            # the same in this process, compiled on a GPU
    fd.build_engine("unet.onnx", "unet.plan")                  # TensorRT-RTX engine and precision ledger
    fd.open_runtime("unet.onnx").infer(images)                 # any artefact: normalised images in, logits out
    fd.load("unet.fp4").predict("photo.jpg").mask              # any artefact: a photo in, class ids out

A name is imported when it is first used: `import fp4deploy` loads neither torch nor onnx nor TensorRT. The names, with
their modules, are listed in `__init__.pyi`, which type checkers read.
"""

import os

import lazy_loader

from fp4deploy.system import torchvision_operators, usage_reports

__version__ = "0.2.0"

usage_reports.switch_off(os.environ)  # before a library that sends them is imported
torchvision_operators.declare_where_missing()  # before it is imported

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
