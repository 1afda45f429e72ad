"""What the plugins hand to TensorRT, executed on a GPU: PTX, name, grid, block, shared memory, arguments in its order.

The engine itself is not here. This is the contract with it: TensorRT loads the PTX, and launches the kernel of that
name with pointers to the inputs, the 32-bit integers, and pointers to the outputs. Nothing else is passed, so that a
kernel that expected more would read past its parameters.
"""

from __future__ import annotations

import pytest
import torch

from fp4deploy.architecture import Architecture
from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.runtime import launch as cuda_launch
from fp4deploy.plugins.tensorrt import Plugin, convolution_plugin
from fp4deploy.plugins.tensorrt.kernels import tactics
from tests.plugins.tensorrt.plugin_cases import (
    CASES,
    IMAGES,
    LIMIT,
    Outputs,
    check,
    check_chain,
    check_quantize,
    packed_variant,
)
from tests.plugins.tensorrt.tensorrt_offers import Ask, stand_in, symbolic
from tests.plugins.tensorrt.test_tensorrt_plugins import shapes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not aot.available(), reason="no NVIDIA GPU that kernels run on"
    ),
]


@pytest.fixture(scope="module")
def ask() -> Ask:
    return stand_in(Architecture.of_device().triton_name)


class Runner:
    """Launches what TensorRT would; `launched` counts."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.launched = ask, 0

    def __call__(
        self, plugin: Plugin, inputs: list[torch.Tensor], attributes: dict[str, list[int]], tactic: int
    ) -> list[torch.Tensor]:
        offer = self.ask(plugin, symbolic(plugin, [tuple(each.shape) for each in inputs]), attributes, tactic)
        found = offer.launch(batch=inputs[0].shape[0])
        outputs = Outputs(plugin, found.shapes, "cuda")
        signature = "P" * len(inputs) + "i" * len(found.integers) + "P" * len(outputs.inner)
        name = offer.name.decode()
        index = torch.cuda.current_device()
        kernel = cuda_launch.load_cubin(
            index, offer.ptx + b"\0", name, signature, f"{plugin.identifier}, tactic {tactic}"
        )
        arguments = [*inputs, *found.integers, *outputs.inner]
        kernel.launch(found.grid, found.block, *arguments, shared=found.shared)
        torch.cuda.synchronize()
        self.launched += 1
        return outputs.checked()


def tactic_numbers(plugin: Plugin) -> range:
    return range(1, len(tactics(plugin, Architecture.of_device().triton_name)) + 1)


def random_bytes(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Any codes; block scales below 1, so that no sum leaves FP16."""
    return torch.randint(0, 0x38 if name.endswith("scales") else 256, shape, device="cuda").to(torch.int8)


@pytest.mark.parametrize("name", CASES)
def test_convolutions(ask: Ask, name: str) -> None:
    case, run = CASES[name], Runner(ask)
    plain = convolution_plugin(len(case.channels), False, case.transposed)
    for tactic in tactic_numbers(packed_variant(plain)):
        found = check(case, run, "cuda", tactic)
        assert found["error"] < LIMIT
        assert found["differing"] == 0
    assert run.launched == 2 * len(tactic_numbers(packed_variant(plain)))


@pytest.mark.parametrize("name", ["64 channels", "two sources", "up"])
def test_every_tactic_gives_the_same(ask: Ask, name: str) -> None:
    """Tiles add in another order only: FP16 outputs are a last place apart at most."""
    case, run = CASES[name], Runner(ask)
    plugin, shapes = shapes_of(case, False)
    torch.manual_seed(2)
    inputs = [
        random_bytes(name, shape) if kind == "INT8" else torch.rand(shape, device="cuda")
        for name, shape, kind in zip(plugin.inputs, shapes, plugin.types(), strict=False)
    ]
    first, *others = (run(plugin, inputs, case.attributes(), tactic)[0].double() for tactic in tactic_numbers(plugin))
    assert first.isfinite().all()
    for other in others:
        assert float((first - other).norm() / first.norm()) < LIMIT


@pytest.mark.parametrize("name", IMAGES)
def test_quantising(ask: Ask, name: str) -> None:
    run = Runner(ask)
    assert check_quantize(IMAGES[name], run, "cuda")["differing"] == 0
    assert run.launched == 2


def test_codes_pass_from_plugin_to_plugin(ask: Ask) -> None:
    run = Runner(ask)
    found = check_chain(run, "cuda")
    # The codes between may differ where a sum in another order crosses a rounding boundary.
    assert found["differing"] < 0.01
    assert found["error"] < 0.02
    assert run.launched == 3
