"""The cases: kernels, tensors, and the bytes that must come out.

| module | kernels |
|---|---|
| `gemms` | Triton's: implicit GEMMs, W4A16 |
| `contractions` | Triton's: GEMMs and convolutions of the C library's generated plans |
| `decoded` | Triton's: convolutions with decoded weights, split-K, moments |
| `block_scaled` | convolutions by block-scaled mma.sync, for SM120 |
| `direct` | convolutions of few channels, decoded once into shared memory |
| `warpgroup` | convolutions by wgmma, for SM90 |
| `small_k` | FP16 convolutions of small K on tensor cores |
| `narrow_wgrad` | weight gradients of convolutions of few channels |
| `depthwise` | convolutions with a filter for each channel |
| `training` | the GEMMs of a training step, and what packs their operands |
| `plugins` | the entry points of the TensorRT plugins |
| `cuda` | quantisers, weights, GEMV |
| `plain` | FP16 convolutions and copies |
| `channels_last` | feature maps in channels_last: GroupNorm, pooling, concatenation, gradients, packing |
| `losses` | sums over the pixels of a segmentation, and their gradient |
| `frames` | frames before a network: resized and normalised; and after it: classes, from logits of another size |

`case` says what a case is.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp4deploy.errors import InputError, suggest
from fp4deploy_emulator.cases import (
    block_scaled,
    channels_last,
    contractions,
    cuda,
    decoded,
    depthwise,
    direct,
    frames,
    gemms,
    losses,
    narrow_wgrad,
    plain,
    plugins,
    small_k,
    training,
    warpgroup,
)
from fp4deploy_emulator.cases.case import Case

TRITON = (*gemms.CASES, *decoded.CASES, *training.GEMMS, *plugins.CASES, *contractions.CASES)
CUDA = (
    *cuda.CASES,
    *channels_last.CASES,
    *losses.CASES,
    *frames.CASES,
    *plain.CASES,
    *small_k.CASES,
    *narrow_wgrad.CASES,
    *depthwise.CASES,
    *direct.CASES,
    *warpgroup.CASES,
    *block_scaled.CASES,
    *training.PACKING,
)


def cases(names: Sequence[str] = (), capability: int = 120) -> list[Case]:
    """Every case of an architecture, or those whose name or family is among `names`.

    Raises:
        InputError: a name that is none.
    """
    known = [case for case in (*TRITON, *CUDA) if case.supports(capability)]
    valid = {case.family for case in known} | {case.name for case in known}
    for name in names:
        if name not in valid:
            families = ", ".join(dict.fromkeys(case.family for case in known))
            raise InputError(f"There is no kernel '{name}'.{suggest(name, valid)} Families: {families}.")
    return [case for case in known if not names or {case.name, case.family} & {*names}]
