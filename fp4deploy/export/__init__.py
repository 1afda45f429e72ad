"""torch -> canonical NVFP4 ONNX -> lowered graph -> engine, and the ledger of what runs in which precision.

| package | input -> output |
|---|---|
| `to_onnx` | checkpoint -> verified .onnx files |
| `to_packed` | checkpoint -> verified .fp4 file |
| `onnx` | torch module -> canonical graph -> decomposed graph |
| `verify` | exported graph and torch -> agreement |
| `lowering` | canonical graph -> graph for one compiler, planned precision |
| `engine` | lowered graph -> plan |
| `ledger` | planned precision and list of kernels -> actual precision |

Names are imported when they are first used, so that reading a ledger does not load torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
