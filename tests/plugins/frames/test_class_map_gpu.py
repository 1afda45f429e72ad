"""The kernel of classes of frames against its reference on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.plugins import available
from fp4deploy.plugins.frames import class_map as module
from fp4deploy.plugins.frames.class_map import class_map, class_map_kernel, class_map_reference
from tests.plugins.frames.test_class_map import sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

LAST, FIRST = torch.channels_last, torch.contiguous_format
SIZES = [(48, 64), (35, 47), (101, 37), (24, 32), (5, 7), (1, 1), (47, 400)]


def poison() -> None:
    """Memory that comes next has every bit set."""
    torch.full((1 << 22,), 255, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("classes", [1, 2, 19, 20, 33, 150, 300])
def test_every_class_is_that_of_the_reference(classes: int, dtype: torch.dtype, layout: torch.memory_format) -> None:
    logits, mask = sample(2, classes, 35, 47, dtype=dtype), torch.uint8 if classes < 256 else torch.uint16
    given = logits.cuda().to(memory_format=layout)
    for size in SIZES:
        poison()
        found = class_map(given, size, mask).cpu()
        assert torch.equal(found, class_map_reference(logits, size, mask)), size
    assert not module.fallback.missed(given.device)
    assert not module.fallback.refused(given.device)


@pytest.mark.parametrize("columns", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("shared", [0, 1 << 16])
def test_every_block(columns: int, rows: int, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED", shared)
    monkeypatch.setattr(module, "LINE", 0)
    logits = sample(3, 20, 88, 120, dtype=torch.float16)
    poison()
    found = class_map_kernel(logits.cuda().to(memory_format=LAST), (120, 160), torch.uint8, (columns, rows))
    assert torch.equal(found.cpu(), class_map_reference(logits, (120, 160), torch.uint8))


def test_in_a_cuda_graph() -> None:
    logits = torch.zeros(1, 20, 9, 13, device="cuda", dtype=torch.float16).to(memory_format=LAST)
    class_map(logits, (30, 40), torch.uint8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = class_map(logits, (30, 40), torch.uint8)
    wanted = sample(1, 20, 9, 13, dtype=torch.float16)
    logits.copy_(wanted)
    graph.replay()
    assert torch.equal(found.cpu(), class_map_reference(wanted, (30, 40), torch.uint8))


def test_by_torch_on_a_gpu() -> None:
    """Where kernels are off: the same bits."""
    logits = sample(2, 19, 35, 47, dtype=torch.float16)
    for size in SIZES:
        found = class_map_reference(logits.cuda(), size, torch.uint8).cpu()
        assert torch.equal(found, class_map_reference(logits, size, torch.uint8)), size
