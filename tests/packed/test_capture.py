"""CUDA graphs of packed networks without a GPU: what a run owns, which shapes are kept, what a refusal leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from fp4deploy.bench import layers
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.packed import capture
from fp4deploy.packed.capture import SHAPES, CapturedNetwork
from fp4deploy.plugins.runtime import choices as kept_choices


class Graph:
    """In place of a CUDA graph: a replay does what the real one does with freed memory, nothing."""

    def replay(self) -> None:
        return


class Network:
    """x + 1 of images of up to 64 pixels, on a "GPU"; remembers what it was run on."""

    device, dtype, input_dtype = torch.device("cuda"), torch.float32, torch.float32

    graph = SimpleNamespace(inputs=[SimpleNamespace(dtype="float32")])

    def __init__(self) -> None:
        self.read: list[weakref.ref[torch.Tensor]] = []

    def sizes(self, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[-1] > 64:
            raise InputError("too large")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes((x,))
        self.read.append(weakref.ref(x))
        return x + 1


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = MagicMock(CUDAGraph=Graph, device=nullcontext, stream=nullcontext)
    cuda.graph = lambda *_, **__: nullcontext()
    monkeypatch.setattr(torch, "cuda", cuda)
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, *given: to(x, *given))


def captured(network: Any) -> CapturedNetwork:
    return CapturedNetwork(network)


def image(size: int = 8) -> torch.Tensor:
    return torch.zeros(1, 3, size, size)


def static(network: Network) -> Callable[[], torch.Tensor | None]:
    """The tensor that the last run of a network read, if it is still alive."""
    return network.read[-1]


def test_a_run_outlives_what_prepared_it() -> None:
    network = Network()
    run = captured(network).prepared(image())
    held, alive = static(network), weakref.ref(network)
    del network
    gc.collect()
    assert held() is not None
    assert alive() is not None  # and with it the weights
    assert torch.equal(run(), image() + 1)  # type: ignore[arg-type]
    del run
    gc.collect()
    assert held() is None


def test_a_run_outlives_its_place_among_the_shapes() -> None:
    network = Network()
    many = captured(network)
    first = many.prepared(image(8))
    held = static(network)
    for size in range(9, 9 + SHAPES):
        many.prepared(image(size))
    gc.collect()
    assert len(many._runs) == SHAPES
    assert held() is not None
    assert first is not many.prepared(image(8))


def test_a_refused_shape_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    many = captured(network)
    runs = [many.prepared(image(8 + at)) for at in range(SHAPES)]
    with pytest.raises(InputError, match="too large"):
        many.prepared(image(65))
    assert [many.prepared(image(8 + at)) for at in range(SHAPES)] == runs

    def out_of_memory(x: torch.Tensor) -> torch.Tensor:
        network.read.append(weakref.ref(x))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Network, "__call__", lambda self, x: out_of_memory(x))
    with pytest.raises(torch.OutOfMemoryError):
        many.prepared(image(32))
    gc.collect()
    assert static(network)() is None
    assert len(many._runs) == SHAPES - 1


class Packing(Network):
    """Gives the bytes of an image that is packed."""

    by_default, decodes_layers, steps, file = True, False, (), None
    image_amax = torch.tensor(6.0)

    def sizes(self, inputs: Any) -> None:
        if isinstance(inputs[0], Nvfp4Tensor) and inputs[0].amax is not self.image_amax:
            raise InputError("packed with another amax")

    def __call__(self, x: Any) -> torch.Tensor:
        return torch.cat(x.as_bytes[:2], -1) if isinstance(x, Nvfp4Tensor) else x + 1


def operand(byte: int) -> Nvfp4Tensor:
    codes, scales = (torch.full((1, 3, 13, width), byte, dtype=torch.uint8) for width in (8, 1))
    return Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), Packing.image_amax, torch.Size((1, 3, 13, 13)))


def test_a_graph_reads_operands_where_they_lie() -> None:
    """Copied there before each run; an operand has another graph than an image of the same shape."""
    read: list[Any] = []

    class Seen(Packing):
        def __call__(self, x: Any) -> torch.Tensor:
            read.append(x)
            return super().__call__(x)

    many, given = captured(Seen()), [operand(byte) for byte in (3, 7, 130)]
    for byte, each in zip((3, 7, 130), given, strict=True):
        many.prepared(each)
        held = read[-1]
        assert torch.equal(held.codes, operand(byte).codes)
        assert torch.equal(held.scales.view(torch.uint8), operand(byte).scales.view(torch.uint8))
    assert len({id(each) for each in read}) == 1
    assert [int(each.codes[0, 0, 0, 0]) for each in given] == [3, 7, 130]
    assert torch.equal(many(torch.zeros(1, 3, 13, 13)), torch.ones(1, 3, 13, 13))  # type: ignore[arg-type]


def test_an_operand_of_another_amax_is_refused_in_every_call() -> None:
    many, other = captured(Packing()), replace(operand(3), amax=torch.tensor(6.0))
    many.prepared(operand(3))
    with pytest.raises(InputError, match="another amax"):
        many.prepared(other)


@pytest.mark.parametrize(
    ("mode", "joined", "packed"),
    [("off", True, True), ("auto", False, True), ("auto", True, False), ("on", False, False)],
)
def test_what_may_be_compiled_reads_images(mode: str, joined: bool, packed: bool, choices: dict[str, str]) -> None:
    """An operand that it is given all the same is read by its steps."""
    network: Any = Packing()
    network.decodes_layers = joined
    own = CapturedNetwork(network, compiled=mode)
    assert (own.image_amax is network.image_amax) == packed
    assert torch.equal(own(operand(5)), torch.full((1, 3, 13, 9), 5, dtype=torch.uint8))  # type: ignore[arg-type]
    assert not own.programs


def test_where_capture_fails_kernels_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refused)
    network = Network()
    many = captured(network)
    assert many.replays
    with pytest.warns(UserWarning, match="one by one"):
        run = many.prepared(image())
    assert not many.replays
    assert torch.equal(run(), image() + 1)  # type: ignore[arg-type]


def test_a_layer_that_is_timed_keeps_what_it_reads() -> None:
    x = image()
    held = weakref.ref(x)
    run = layers._repeated(partial(torch.add, x, 1), torch.device("cuda"))
    del x
    gc.collect()
    assert held() is not None
    run()


class Layered(Network):
    """A network of the kind that is compiled; its program computes x + 2."""

    steps, file, by_default, decodes_layers = (object(),), None, True, False

    def named(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        return outputs[0]


class Compiled:
    weights_bytes = 7

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 2]


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Choices instead of the cache, and a compiler that is at hand."""
    kept: dict[str, str] = {}
    monkeypatch.setattr(capture, "compile_program", lambda *_: Compiled())
    monkeypatch.setattr(capture, "choice_key", lambda file, inputs, graphs: str(inputs[0].shape))
    monkeypatch.setattr(capture, "remembered", lambda name, _: kept.get(name))
    monkeypatch.setattr(kept_choices, "remember", kept.__setitem__)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return kept


def times(monkeypatch: pytest.MonkeyPatch, program: float, steps: float) -> None:
    """What the compiled program and the network's own steps take, in this order."""
    given = iter((program, steps))
    monkeypatch.setattr(kept_choices, "milliseconds", lambda run: next(given))


@pytest.mark.parametrize(("program", "steps", "adds"), [(1.0, 2.0, 2), (2.0, 1.0, 1)])
def test_the_faster_form_is_kept_and_remembered(
    program: float, steps: float, adds: int, choices: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times(monkeypatch, program, steps)
    network: Any = Layered()
    for _ in range(2):  # the second time nothing is measured
        own = CapturedNetwork(network, compiled="auto")
        assert torch.equal(own.prepared(image())(), image() + adds)  # type: ignore[arg-type]
        assert len(own.programs) == (adds == 2)
    assert choices == {str(image().shape): "program" if adds == 2 else "kernels"}


@pytest.mark.parametrize(("mode", "adds"), [("on", 2), ("off", 1)])
def test_a_form_that_is_asked_for_is_not_measured(mode: str, adds: int, choices: dict[str, str]) -> None:
    network: Any = Layered()
    own = CapturedNetwork(network, compiled=mode)
    assert torch.equal(own.prepared(image())(), image() + adds)  # type: ignore[arg-type]
    assert not choices


def test_a_network_of_kernels_is_not_compiled(choices: dict[str, str]) -> None:
    network: Any = Layered()
    network.steps = ()
    assert torch.equal(CapturedNetwork(network, compiled="auto").prepared(image())(), image() + 1)  # type: ignore[arg-type]
    assert not choices


def test_what_does_not_compile_is_run_by_kernels(choices: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise UnavailableError("The packed network was not compiled (no compiler).")

    monkeypatch.setattr(capture, "compile_program", fail)
    network: Any = Layered()
    with pytest.warns(UserWarning, match="not compiled .no compiler.. Its nodes are run by kernels"):
        run = CapturedNetwork(network, compiled="auto").prepared(image())
    assert torch.equal(run(), image() + 1)  # type: ignore[arg-type]
    assert not choices


def test_compiled_without_graphs(choices: dict[str, str]) -> None:
    network: Any = Layered()
    own = CapturedNetwork(network, enabled=False, compiled="on")
    assert torch.equal(own(image()), image() + 2)  # type: ignore[arg-type]
    assert not own.replays


def test_what_does_not_fit_into_memory_is_run_by_kernels(
    choices: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large(Compiled):
        def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(capture, "compile_program", lambda *_: Large())
    network: Any = Layered()
    with pytest.warns(UserWarning, match="out of memory"):
        run = CapturedNetwork(network, compiled="auto").prepared(image())
    assert torch.equal(run(), image() + 1)  # type: ignore[arg-type]


def test_programs_go_with_their_shapes(choices: dict[str, str]) -> None:
    network: Any = Layered()
    own = CapturedNetwork(network, compiled="on")
    for size in range(1, SHAPES + 4):
        own.prepared(image(size))
    assert len(own.programs) == SHAPES
    held = weakref.ref(own)
    run = own.prepared(image())
    del own
    assert held() is None  # no cycle, and `run` holds its own shape alone
    assert torch.equal(run(), image() + 2)  # type: ignore[arg-type]


def test_a_form_that_was_asked_for_is_kept(choices: dict[str, str]) -> None:
    network: Any = Layered()
    network.by_default = False  # such as weights="packed"
    assert torch.equal(CapturedNetwork(network, compiled="auto").prepared(image())(), image() + 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [True, False])
def test_calls_inside_and_outside_of_inference_mode(first: bool) -> None:
    """What was captured in one mode is replayed in the other."""
    whole, x = captured(Network()), torch.zeros(1, 3, 4, 4)
    for mode in (first, not first):
        with torch.inference_mode(mode):
            assert whole(x + 1).shape == x.shape
