"""Where a recorded plan puts what launches share: every argument in its tensor's memory, no tensor in another's."""

from __future__ import annotations

import itertools
import random

import torch

from fp4deploy.native.plan import STAGES, Buffer, CudaKernel
from fp4deploy.native.recording import Recording

KERNEL = CudaKernel("kernel.cu", "kernel", "P", ())
PATHS = [
    (one, "body", other) for one, other in itertools.product(*([s for s in STAGES if s.startswith(p)] for p in "io"))
]


def recorded(seed: int) -> tuple[Recording, dict[str, list[list[torch.Tensor]]]]:
    """Launches on whole tensors and on parts of them, of all stages; tensors 0 and 1 are one memory, 2 a constant.

    Half of the recordings have many tensors, each of which is needed for a short time.
    """
    draw, recording = random.Random(seed), Recording()
    count, most = (9, 4) if seed % 2 else (40, 9)
    tensors = [torch.empty(draw.randint(100, 4000), dtype=torch.float16, device="meta") for _ in range(count)]
    tensors[1] = torch.empty_like(tensors[0])
    recording.same(tensors[1], tensors[0])
    recording.role(tensors[2], "constant", 7)
    launches: dict[str, list[list[torch.Tensor]]] = {stage: [] for stage in STAGES}
    for stage in STAGES:
        for _ in range(draw.randint(1, most)):
            given = [each if at == 2 or draw.random() < 0.5 else each[draw.randint(1, 90) :]
                     for at, each in draw.sample(list(enumerate(tensors)), 3)]  # fmt: skip
            launches[stage].append(given)
            with recording.at(stage):
                recording.add(KERNEL, (1, 2), 32, 5, *given, None, shared=9)
    return recording, launches


def test_arguments_lie_in_memory_of_their_own_while_it_is_needed() -> None:
    for seed in range(24):
        recording, launches = recorded(seed)
        stages, total = recording.placed()
        begins: dict[int, int] = {}  # memory -> where it begins
        sizes: dict[int, int] = {}
        used: dict[str, list[set[int]]] = {stage: [] for stage in STAGES}
        for stage in STAGES:
            for made, given in zip(stages[stage], launches[stage], strict=True):
                assert (made.grid, made.block, made.shared) == ((1, 2, 1), 32, 9)
                number, *places, nothing = made.arguments
                assert (number, nothing) == (5, None)
                used[stage].append(set())
                for place, tensor in zip(places, given, strict=True):
                    assert isinstance(place, Buffer)
                    storage = tensor.untyped_storage()._cdata
                    if storage in recording.roles:
                        assert place == Buffer("constant", 7)
                        continue
                    storage = recording.alias.get(storage, storage)
                    begin = place.at - tensor.storage_offset() * tensor.element_size()
                    assert begins.setdefault(storage, begin) == begin
                    sizes[storage] = max(sizes.get(storage, 0), tensor.untyped_storage().nbytes())
                    used[stage][-1].add(storage)
        assert all(begins[each] >= 0 and begins[each] + sizes[each] <= total for each in begins)
        for path in PATHS:
            steps = [each for stage in path for each in used[stage]]
            needed = {storage: [at for at, each in enumerate(steps) if storage in each] for storage in begins}
            for one, other in itertools.combinations([each for each in begins if needed[each]], 2):
                if needed[one][0] <= needed[other][-1] and needed[other][0] <= needed[one][-1]:
                    assert begins[one] + sizes[one] <= begins[other] or begins[other] + sizes[other] <= begins[one]
