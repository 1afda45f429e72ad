"""CUDA kernels that give the bytes of `fp4deploy.formats`: sources in `cuda/`, the compiler, the launching driver.

Nothing here is needed to train, export or measure: where kernels cannot run (`why_unavailable`) or
`FP4DEPLOY_KERNELS=off` is set, the torch reference does the same work, slower.

Each name is imported at first use, so that the compilers (`runtime.nvcc`, `aot`) and their workers start without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
