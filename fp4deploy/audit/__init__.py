"""What precision a file asks for, layer by layer, and what runtimes make of it: for files of any tool.

operands.py      an ONNX graph: format, scaling and block axis of each operand of each GEMM and convolution
targets.py       what TensorRT-RTX, TensorRT and ONNX Runtime run for such a layer, and why
engine_info.py   layer information that TensorRT's engine inspector wrote: what an engine runs
ort_profile.py   a profile of ONNX Runtime: what ran, and how long
report.py        rows and verdict of one file
"""
