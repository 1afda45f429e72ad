"""Packed networks without Python: launch plans and kernel bundles for `libfp4deploy`, the C library in `native/`.

    file = read_packed("unet.fp4")
    plan = record(file, Gpu(Architecture(9, 0), "NVIDIA H200", 132), (1, 3, 352, 480))
    write_bundle(Path("unet-sm90.kernels"), file, [plan])

| module | what it holds |
|---|---|
| `plan` | what a launch plan is: kernels, arguments, buffers |
| `record`, `recording` | every launch of a network for one shape of its input, recorded without a GPU |
| `arena` | one block of memory for all activations: where each lies, from when to when |
| `bundle` | the plans with the machine code of their kernels as one file |
| `library` | the C library called from Python, for comparisons |

A `.fp4` file is a network and says nothing of kernels. Which kernels run, with which tiles, grids and arguments, is
decided by the code of `plugins`; here it decides on tensors without data, and what it would launch is written down. The
C library checks the `.fp4` file and replays the plan, so that both runtimes launch the same kernels with the same
arguments.

None of these kernels needs a tensor map (TMA descriptor) or a programmatic dependent launch: those belong to the GEMV
of linear layers, which no plan contains.
"""

from fp4deploy.native.bundle import write_bundle
from fp4deploy.native.plan import Gpu, Plan
from fp4deploy.native.record import record

__all__ = ["Gpu", "Plan", "record", "write_bundle"]
