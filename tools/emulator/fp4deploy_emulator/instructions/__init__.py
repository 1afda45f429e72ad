"""The instructions that the emulator implements, one module a family; importing this package registers all of them.

arithmetic, conversion     integer and floating-point numbers; cvt
data, copies               loads, stores, atomics, ldmatrix; cp.async
control                    branches, barriers, shuffles, votes, elect
bulk, tensor_copies        mbarrier, bulk copies; TMA, bulk groups
cluster_launch             clusterlaunchcontrol
matrix, warpgroup          mma.sync; wgmma
tensor_memory, tensor_core tcgen05
"""

from fp4deploy_emulator.instructions import (
    arithmetic,
    bulk,
    cluster_launch,
    control,
    conversion,
    copies,
    data,
    matrix,
    tensor_copies,
    tensor_core,
    tensor_memory,
    warpgroup,
)

FAMILIES = (
    *(arithmetic, bulk, cluster_launch, control, conversion, copies, data, matrix),
    *(tensor_copies, tensor_core, tensor_memory, warpgroup),
)
