"""The delayed amax: a step quantises with the moving maximum of the steps before it, and then moves it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp4deploy.formats import ZEROS_AMAX, FourOverSix, fake_quantize_nvfp4
from fp4deploy.plugins import available
from fp4deploy.qat import RECIPES, QuantizedLayer, QuantSpec, Recipe, calibrate, prepare, quantized_layers, restore
from tests.qat.layer_cases import generator, quantized

DELAYED = replace(RECIPES["nvfp4_qat_delayed"], amax_decay=0.5)
FOUR_OVER_SIX = replace(DELAYED, name="4/6", activation=QuantSpec(scale="static", four_over_six=FourOverSix()))
THREE_PRODUCTS = Recipe(  # of one's own: static forward, quantised backward
    "three",
    QuantSpec(scale="static"),
    QuantSpec(),
    dgrad_gradient=QuantSpec(),
    wgrad_gradient=QuantSpec(),
    amax_decay=0.5,
    amax_timing="delayed",
)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(48, 32), (5, 48), 1),
    "linear ragged, 3-D": (lambda: nn.Linear(40, 10), (2, 7, 40), 2),
    "conv": (lambda: nn.Conv2d(32, 24, 3), (2, 32, 6, 5), 1),
    "conv ragged groups": (lambda: nn.Conv2d(60, 36, 3, groups=3), (2, 60, 4, 5), 1),
    "transposed": (lambda: nn.ConvTranspose2d(32, 12, 2, stride=2), (2, 32, 4, 3), 1),
}
# The largest magnitude of each batch, what the step quantises with, and the tracked amax after it; the decay is 0.5.
# The first step has only its own. Then 8 arrives and saturates at 2; and so on.
STEPS = [(2.0, 2.0, 2.0), (8.0, 2.0, 8.0), (1.0, 8.0, 4.0), (1.0, 4.0, 2.0), (3.0, 2.0, 3.0), (0.0, 3.0, 1.5)]


def prepared(kind: str, recipe: Recipe) -> tuple[nn.Sequential, QuantizedLayer]:
    torch.manual_seed(0)
    model = quantized(LAYERS[kind][0](), recipe)
    return model.train(), model[0]  # type: ignore[return-value]


def batch(shape: tuple[int, ...], largest: float, seed: int = 0) -> torch.Tensor:
    x = torch.rand(shape, generator=generator(seed)) * 1.8 * largest - 0.9 * largest
    x.view(-1)[3] = -largest
    return x


def by_hand(x: torch.Tensor, axis: int, amax: float, recipe: Recipe, groups: int = 1) -> torch.Tensor:
    choice = recipe.activation.four_over_six if recipe.activation else None
    parts = x.chunk(groups, axis)
    return torch.cat([fake_quantize_nvfp4(part, (axis,), amax, four_over_six=choice)[0] for part in parts], axis)


@pytest.mark.parametrize("recipe", [DELAYED, FOUR_OVER_SIX], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("gradient", [False, True])
def test_a_step_quantises_with_the_amax_before_it(kind: str, recipe: Recipe, gradient: bool) -> None:
    _, layer = prepared(kind, recipe)
    _, shape, axis = LAYERS[kind]
    for seed, (own, used, tracked) in enumerate(STEPS):
        x = batch(shape, own, seed)
        found = layer.quantized_input(x.clone().requires_grad_(gradient))
        assert torch.equal(found, by_hand(x, axis, used, recipe, getattr(layer, "groups", 1))), seed
        assert layer.input_amax == tracked, seed


@pytest.mark.parametrize("recipe", [DELAYED, THREE_PRODUCTS], ids=lambda recipe: recipe.name)
def test_outputs_and_gradients_over_steps(recipe: Recipe) -> None:
    """A saturated element has no gradient, though it was the one that moved the amax."""
    model, layer = prepared("linear", recipe)
    wq = fake_quantize_nvfp4(layer.weight.detach(), (1,))[0]
    for seed, (own, used, tracked) in enumerate(STEPS):
        x = batch((5, 48), own, seed).requires_grad_()
        y = model(x)
        assert torch.equal(y, F.linear(by_hand(x.detach(), 1, used, recipe), wq, layer.bias))
        y.sum().backward()
        _, inside = fake_quantize_nvfp4(x.detach(), (1,), used)
        assert torch.equal(x.grad == 0, ~inside)
        assert ((~inside).float().mean() > 0.1) == (own > used)
        assert layer.input_amax == tracked


def test_the_first_steps_of_both_timings_agree_and_the_tracked_amaxes_always() -> None:
    current, delayed = (prepared("conv", replace(DELAYED, amax_timing=timing)) for timing in ("current", "delayed"))
    differ = []
    for seed, (own, _, tracked) in enumerate(STEPS):
        x = batch((2, 32, 6, 5), own, seed)
        differ.append(not torch.equal(current[0](x), delayed[0](x)))
        assert current[1].input_amax == delayed[1].input_amax == tracked
    assert (differ[0], differ[1], differ[4]) == (False, True, True)  # a scale of twice as much gives the same values


def test_zeros_and_infinities_are_not_a_maximum() -> None:
    """Zeros before any other batch stay zeros, and the step after them is still the first."""
    _, layer = prepared("linear", DELAYED)
    assert not layer.quantized_input(torch.zeros(5, 48)).any()
    assert layer.input_amax == ZEROS_AMAX
    x = batch((5, 48), 4.0)
    assert torch.equal(layer.quantized_input(x), by_hand(x, 1, 4.0, DELAYED))
    broken = batch((5, 48), 6.0)
    broken[1, 5], broken[2, 7] = torch.inf, torch.nan
    layer.quantized_input(broken)
    assert layer.input_amax == 6.0


def test_evaluation_takes_the_tracked_amax_and_moves_nothing() -> None:
    model, layer = prepared("linear", DELAYED)
    for seed, (own, _, _) in enumerate(STEPS):
        model(batch((5, 48), own, seed))
    x, tracked = batch((5, 48), 7.0), STEPS[-1][2]
    model.eval()
    assert torch.equal(layer.quantized_input(x), by_hand(x, 1, tracked, DELAYED))
    assert layer.input_amax == tracked


def test_calibration_comes_before_the_first_step() -> None:
    model, layer = prepared("linear", DELAYED)
    calibrate(model, [batch((5, 48), 5.0), batch((5, 48), 3.0)])
    assert layer.input_amax == 5.0
    x = batch((5, 48), 20.0)
    assert torch.equal(layer.quantized_input(x), by_hand(x, 1, 5.0, DELAYED))
    assert layer.input_amax == 20.0


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(16, 32, 3), nn.GroupNorm(4, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return prepare(Chain(), DELAYED, include=["conv", "fc"]).train()


def step(model: nn.Module, x: torch.Tensor, forward: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x) if forward is None else forward(x)
    y.square().sum().backward()
    assert x.grad is not None
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *gradients, *(buffer.clone() for buffer in model.buffers())]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_is_fresh", [True, False])
def test_a_recomputation_moves_nothing_and_takes_the_amax_of_the_first_time(
    reentrant: bool, model_is_fresh: bool
) -> None:
    """Rising and falling amaxes: the one before a step and the one after it differ in every step but the first."""
    plain, other = chain(), chain()
    if not model_is_fresh:
        for model in (plain, other):
            model(batch((2, 16, 6, 6), 1.0))
    for seed, (own, _, _) in enumerate(STEPS[:5]):
        x = batch((2, 16, 6, 6), own, seed)
        again = step(other, x, lambda x: checkpoint(other, x, use_reentrant=reentrant))
        assert same(step(plain, x), again), seed


def test_several_batches_a_step_are_several_moves() -> None:
    """Gradient accumulation: every forward in training moves the amax, also where the gradients are kept."""
    model, layer = prepared("linear", DELAYED)
    for seed, (own, _, tracked) in enumerate(STEPS):
        model(batch((5, 48), own, seed)).sum().backward()
        assert layer.input_amax == tracked


@pytest.mark.parametrize("stop", [1, 3])
def test_a_state_resumes_exactly(stop: int) -> None:
    """Nothing but `input_amax` is saved, and nothing else is needed."""
    straight, before = chain(), chain()
    batches = [batch((2, 16, 6, 6), own, seed) for seed, (own, _, _) in enumerate(STEPS[:5])]
    expected = [step(straight, x) for x in batches]
    for x in batches[:stop]:
        step(before, x)
    assert [name for name in before.state_dict() if "amax" in name] == ["conv.input_amax", "fc.input_amax"]
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = chain()
    after.load_state_dict(torch.load(file, weights_only=True))
    assert all(same(step(after, x), reached) for x, reached in zip(batches[stop:], expected[stop:], strict=True))


def test_another_timing_takes_over_what_was_tracked() -> None:
    model, layer = prepared("linear", replace(DELAYED, amax_timing="current"))
    model(batch((5, 48), 4.0))
    prepare(model, DELAYED, include=["0"])
    x = batch((5, 48), 9.0)
    assert torch.equal(layer.quantized_input(x), by_hand(x, 1, 4.0, DELAYED))


def test_under_autocast_the_amax_is_that_of_float32() -> None:
    model, layer = prepared("linear", DELAYED)
    plain = copy.deepcopy(model)
    for seed, (own, _, _) in enumerate(STEPS[:4]):
        x = batch((5, 48), own, seed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        plain(x)
    assert layer.input_amax == plain[0].input_amax
    assert layer.input_amax.dtype == torch.float32


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_compiled_over_steps_with_the_same_bits(backend: str) -> None:
    torch._dynamo.reset()
    eager, model = chain(), chain()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed, (own, _, _) in enumerate(STEPS[:5]):
        x = batch((2, 16, 6, 6), own, seed)
        assert same(step(model, x, compiled), step(eager, x)), seed
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", [DELAYED, FOUR_OVER_SIX, THREE_PRODUCTS], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("kind", LAYERS)
def test_on_a_gpu_the_same_bits(kind: str, recipe: Recipe, dtype: torch.dtype) -> None:
    """Kernels on a GPU and the reference on a CPU, forward and clipped gradient, step by step."""
    reference, kernels = prepared(kind, recipe)[1], prepared(kind, recipe)[1].cuda()
    for seed, (own, _, tracked) in enumerate(STEPS):
        sides = []
        for layer in (reference, kernels):
            x = batch(LAYERS[kind][1], own, seed).to(dtype).to(layer.weight.device).requires_grad_()
            y = layer.quantized_input(x)
            y.sum().backward()
            assert x.grad is not None
            sides.append((y.detach().cpu(), x.grad.cpu()))
        assert torch.equal(sides[0][0].nan_to_num(9), sides[1][0].nan_to_num(9)), seed
        assert torch.equal(sides[0][1], sides[1][1]), seed
        assert layer.input_amax == reference.input_amax == tracked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on")
def test_in_a_cuda_graph_from_the_first_step_on() -> None:
    """Whether a step is the first is decided on the GPU: one graph has both."""
    layer = prepared("linear", DELAYED)[1].cuda()
    x = torch.zeros(5, 48, device="cuda")
    with torch.no_grad():
        layer.quantized_input(x)  # compiles; the step after zeros is still the first
        assert layer.input_amax == ZEROS_AMAX
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.quantized_input(x)
        for seed, (own, used, tracked) in enumerate(STEPS):
            x.copy_(batch((5, 48), own, seed))
            graph.replay()
            assert torch.equal(captured.cpu(), by_hand(x.cpu(), 1, used, DELAYED)), seed
            assert layer.input_amax == tracked


def test_restore_leaves_no_trace() -> None:
    model, layer = prepared("linear", DELAYED)
    model(batch((5, 48), 1.0))
    restore(model)
    assert not quantized_layers(model)
    assert vars(layer).keys() == vars(nn.Linear(1, 1)).keys()
