"""Networks that other tools wrote: ONNX files as torch modules, models quantised by ModelOpt.

onnx_network     a plain ONNX convolution network as a torch module with the layers' names
modelopt         models quantised by ModelOpt: weights, amaxes and formats, in both directions
quantize_onnx    such a file -> calibration -> canonical NVFP4 file, compared with ONNX Runtime before and after
"""
