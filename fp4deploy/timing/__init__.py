"""How long a layer takes on a GPU that may not be here: a static model with an error bar.

    estimate_network(read_packed("unet.fp4"), find_gpu("sm120"))       milliseconds of each layer, and their sum

| module | what is in it |
|---|---|
| `model` | the formula, its fitted factors and the distribution of its error |
| `launches` | which kernel computes a layer, and what it does: programs, steps, machine code of a step, bytes |
| `library` | the same of kernels that are not ours: cuDNN, cuBLAS, TensorRT |
| `passes` | bytes of the operators of torch that a layer has beside its product |
| `network` | layers of a packed network |

`benchmarks/time_model.py` fits the factors to layers that were timed on an H200, half of which it holds out, and writes
`fitted.json`; `loops.json` has what the compiler made of the main loops, from their machine code.
"""
