"""The instructions that the emulator implements, one module a family; importing this package registers all of them.

arithmetic, conversion     integer and floating-point numbers; cvt
data, copies               loads, stores, atomics, ldmatrix; cp.async
control                    branches, barriers, shuffles, votes, elect
bulk                       mbarrier, TMA, clusters
matrix, warpgroup          mma.sync; wgmma
tensor_memory              tcgen05
"""

from fp4deploy_emulator.instructions import (
    arithmetic,
    bulk,
    control,
    conversion,
    copies,
    data,
    matrix,
    tensor_memory,
    warpgroup,
)

FAMILIES = (arithmetic, bulk, control, conversion, copies, data, matrix, tensor_memory, warpgroup)
