"""TensorRT plugins for FP4 convolutions, which TensorRT itself does not have; the kernels are our Triton kernels.

    import tensorrt as trt, tensorrt.plugin as trtp
    register_plugins(trt, trtp, "sm100")            # then parse an ONNX file that `lower(..., conv="plugin")` wrote

They are *quick* plugins with an ahead-of-time implementation: at build time TensorRT asks for the PTX of one kernel per
node, its grid as an expression of the shapes, and its integer arguments; the engine then needs neither Python nor a
shared library. `definitions` describes the plugins, `kernels` what is compiled for them, `register` calls TensorRT's
API. TensorRT and Triton are imported only when they are needed. docs/plugins.md says which parts have been run.
"""

from fp4deploy.plugins.tensorrt.definitions import NAMESPACE, PLUGINS, QUANTIZE, VERSION, Plugin, convolution_plugin
from fp4deploy.plugins.tensorrt.register import register_plugins

__all__ = ["NAMESPACE", "PLUGINS", "QUANTIZE", "VERSION", "Plugin", "convolution_plugin", "register_plugins"]
