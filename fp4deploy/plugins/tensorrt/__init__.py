"""TensorRT plugins made of the packed kernels: FP4 convolutions that TensorRT itself does not have.

    import tensorrt as trt, tensorrt.plugin as trtp
    register_plugins(trt, trtp, "sm100")            # then parse an ONNX file that `lower(..., conv="plugin")` wrote

They are *quick* plugins with an ahead-of-time implementation: at build time TensorRT asks for the PTX of one kernel a
node, its grid as an expression of shapes, and its integers; the engine then needs neither Python nor a shared library.
`definitions` says what the plugins are, `kernels` what is compiled, `register` speaks TensorRT's API. Nothing here
imports TensorRT or Triton before it is needed. See docs/plugins.md, also for what of it was run.
"""

from fp4deploy.plugins.tensorrt.definitions import NAMESPACE, PLUGINS, QUANTIZE, VERSION, Plugin, product_plugin
from fp4deploy.plugins.tensorrt.register import register_plugins

__all__ = ["NAMESPACE", "PLUGINS", "QUANTIZE", "VERSION", "Plugin", "product_plugin", "register_plugins"]
