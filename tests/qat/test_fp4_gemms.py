"""GEMMs of packed operands: the emulation's codes, its results up to a sum's order, and what the backward keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix
from fp4deploy.qat import RECIPES, QuantSpec, Recipe, prepare, set_products
from fp4deploy.qat.fp4_gemms import dispatch, reference
from fp4deploy.qat.fp4_gemms.operands import PackedOperand, pack_operand
from fp4deploy.qat.fp4_gemms.requirements import require_packed
from fp4deploy.qat.operators.gemms import ConvGemms, LinearGemms
from fp4deploy.qat.operators.quantizers import quantize_operand
from tests.qat.layer_cases import LAYERS, make, quantized
from tests.qat.reference_gemms import check, one_step
from tests.samples import sample

TRAINING = [name for name, recipe in RECIPES.items() if all(recipe.operands().values())]
MINE = {
    "static": replace(RECIPES["nvfp4_train"], name="static", activation=QuantSpec(scale="static")),
    "static double": replace(
        RECIPES["fp4_all_the_way"], name="b", activation=QuantSpec(scale="static"), double_quantization=True
    ),
    "4/6": Recipe("i", *[QuantSpec(four_over_six=FourOverSix("mse", 448))] * 6),
    "transformed": Recipe("j", *[QuantSpec(hadamard=True)] * 6),
    "MX transformed": Recipe("m", *[QuantSpec("mxfp4")] * 4, *[QuantSpec("mxfp4", hadamard=True)] * 2),
    "MS-EDEN": Recipe("e", *[QuantSpec()] * 2, *[QuantSpec(rounding="ms_eden")] * 4),
    "rows": Recipe("r", QuantSpec(row_scaled=True), *[QuantSpec()] * 4, QuantSpec(row_scaled=True)),
}
RECIPES_HERE = {name: RECIPES[name] for name in TRAINING} | MINE
FEW = [
    "linear ragged, 3-D",
    "conv uneven everything",
    "conv ragged groups",
    "conv unbatched",
    "transposed groups, dilation",
]
CASES = [(recipe, name) for recipe in TRAINING for name in FEW]
CASES += [(recipe, name) for recipe in MINE for name in ("linear ragged, 3-D", "conv ragged groups")]
CASES += [(recipe, name) for recipe in ("nvfp4_train", "tetrajet") for name in LAYERS if name not in FEW]
EVERY = sample(TRAINING, LAYERS, every=3)
EVERY += [pytest.param(*case) for case in CASES if case[0] in MINE]
U, ROTATION = 2.0**-24, torch.tensor(5)


def gemms_of(layer: Any) -> LinearGemms | ConvGemms:
    """The GEMMs of a layer, with the padding that a convolution adds when it is called."""
    gemms: LinearGemms | ConvGemms = layer.gemms()
    numbers = isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return replace(gemms, padding=tuple(layer.padding)) if numbers else gemms  # type: ignore[call-arg]


def operands(name: str, recipe: Recipe) -> list[tuple[torch.Tensor, QuantSpec, tuple[int, ...], tuple[int, ...]]]:
    """The six operands of a layer with its shapes, as `quantize_operand` takes them."""
    layer, x = make(name)
    model = quantized(layer, recipe).eval()
    if layer.input_amax is not None:
        layer.input_amax.fill_(2.0)
    gemms = gemms_of(layer)
    y = model(x)
    gradient = 1e-3 * torch.randn_like(y.detach())
    x, gradient = (t if t.ndim != 3 or isinstance(layer, nn.Linear) else t[None] for t in (x.detach(), gradient))
    weight = layer.weight.detach()
    rows, columns = gemms.wgrad_gradient(gradient, x.shape), gemms.wgrad_input(x, gradient.shape)
    axes, groups = gemms.weight_axes, gemms.weight_groups
    return [
        (x, recipe.activation, (gemms.input_axis,), (gemms.groups,)),
        (weight, recipe.weight, axes, groups),
        (gradient, recipe.dgrad_gradient, (gemms.input_axis,), (gemms.groups,)),
        (weight, recipe.dgrad_weight, axes[::-1], groups[::-1]),
        (rows, recipe.wgrad_gradient, (gemms.wgrad_axis,), (1,)),
        (columns, recipe.wgrad_activation, (gemms.wgrad_axis,), (1,)),
    ]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("recipe", "name"), EVERY)
def test_packed_codes_are_the_emulations(recipe: str, name: str) -> None:
    """With the same seeds, of all six operands, in every layout: values equal in every bit, at 4.5 bits each."""
    for place, (x, spec, axes, groups) in enumerate(operands(name, RECIPES_HERE[recipe])):
        amax = torch.tensor(2.0) if spec.scale == "static" else None
        torch.manual_seed(place)
        expected, _ = quantize_operand(x, spec, axes, amax, groups, ROTATION)
        torch.manual_seed(place)
        packed = pack_operand(x, spec, axes, amax, groups, ROTATION)
        assert torch.equal(packed.dequantize(x.dtype), expected), place
        codes, scales = packed.packed.codes, packed.packed.scales
        assert codes.dtype == torch.uint8
        assert codes.numel() * 2 == scales.numel() * (16 if spec.format == "nvfp4" else 32)


@pytest.mark.usefixtures("one_byte")
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_a_step_is_the_emulations(recipe: str, name: str) -> None:
    """Y, dX, dW and db in float64, where nothing but an operand can differ."""
    layer, x = make(name)
    model = quantized(layer.double(), RECIPES_HERE[recipe]).train()
    found = []
    for products in ("emulated", "fp4"):
        set_products(model, products)
        model.zero_grad()
        found.append(one_step(model, x.detach().double().requires_grad_())[0])
    check(found[1], found[0], 1e-12)


def exact(values: tuple[torch.Tensor, torch.Tensor], which: str, layer: Any, x: torch.Tensor) -> torch.Tensor:
    (first, second), gemms = values, gemms_of(layer)
    if which == "fprop":
        return gemms.forward(first, second, None)
    if which == "dgrad":
        return gemms.dgrad(first, second, x.to(first.dtype))
    return gemms.wgrad(first, second, layer.weight)


@pytest.mark.parametrize("name", ["linear", "linear ragged, 3-D", "conv", "conv uneven everything", "transposed"])
@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
def test_products_lie_within_the_stated_bound(which: str, name: str) -> None:
    """Both ways of multiplying, in FP32, lie within (K + 8) u sum |a| |b| of the float64 sum of the same operands."""
    layer, x = make(name)
    prepare(nn.Sequential(layer), "nvfp4_train", include=["0"])
    pairs = [pack_operand(t, spec, axes, None, groups) for t, spec, axes, groups in operands(name, layer.recipe)]
    place = {"fprop": (0, 1), "dgrad": (2, 3), "wgrad": (5, 4)}[which]
    first, second = (pairs[at] for at in (place if which != "wgrad" else place[::-1]))
    double = (first.dequantize(torch.float64), second.dequantize(torch.float64))
    gemms = gemms_of(layer)
    correct = exact(double, which, layer, x)
    magnitude = exact((double[0].abs(), double[1].abs()), which, layer, x)
    ones = exact((torch.ones_like(double[0]), torch.ones_like(double[1])), which, layer, x)
    found = {
        "fprop": lambda: reference.fprop(first, second, None, gemms, torch.float32),
        "dgrad": lambda: reference.dgrad(first, second, gemms, x.shape, torch.float32),
        "wgrad": lambda: reference.wgrad(first, second, gemms, layer.weight.shape, torch.float32),
    }[which]()
    emulated = exact((double[0].float(), double[1].float()), which, layer, x)
    for product in (found, emulated):
        assert product.dtype == torch.float32
        assert ((product.double() - correct).abs() <= (ones + 8) * U * magnitude).all()


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_size_and_dtype_packs_and_returns(dtype: torch.dtype, size: int) -> None:
    for recipe in ("nvfp4_train", "tetrajet"):
        layer = prepare(nn.Sequential(nn.Conv2d(size, size, 3, padding=1)), recipe, include=["0"]).to(dtype)
        set_products(layer, "fp4")
        x = torch.randn(1, size, 3, 1, dtype=dtype, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == layer[0].weight.grad.dtype == dtype
        assert all(t.isfinite().all() for t in (y, x.grad, layer[0].weight.grad))


def kept_bytes(layer: nn.Module, recipe: str, products: str, x: torch.Tensor) -> int:
    """Bytes that the backward keeps, parameters aside."""
    model = set_products(prepare(nn.Sequential(layer), recipe, include=["0"]), products)
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("layer", "recipe", "bits"),
    [
        (nn.Linear(64, 16), "nvfp4_train", 4.5),
        (nn.Linear(64, 16), "mx_baseline", 4.25),
        (nn.Conv2d(64, 16, 1), "nvfp4_train", 4.5),
        (nn.ConvTranspose2d(64, 16, 2, 2), "nvfp4_train", 4.5),
        (nn.Conv2d(64, 16, 3), "tetrajet", 4.25),
        (nn.Conv2d(64, 16, 3), "nvfp4_train", 32),
    ],
)
def test_what_the_backward_keeps_of_the_activation(layer: nn.Module, recipe: str, bits: float) -> None:
    x = torch.randn((256, 64) if isinstance(layer, nn.Linear) else (4, 64, 16, 16)).requires_grad_()
    filters = 0 if recipe != "tetrajet" else layer.weight.numel() * bits / 8
    amax = 4 if recipe == "nvfp4_train" and bits < 32 else 0
    assert kept_bytes(layer, recipe, "fp4", x) == x.numel() * bits / 8 + filters + amax
    assert kept_bytes(layer, recipe, "emulated", x) >= x.numel() * 4


def test_evaluation_keeps_nothing_and_is_the_same() -> None:
    layer, x = make("conv")
    model = set_products(prepare(nn.Sequential(layer), "fp4_all_the_way", include=["0"]), "fp4").eval()
    with torch.no_grad():
        found = model(x)
        expected = set_products(model, "emulated")(x)
    assert found.grad_fn is None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("recipe", ["nvfp4_train", "fp4_all_the_way"])
def test_gradient_checkpointing_changes_nothing(recipe: str) -> None:
    """Also where an activation is rounded stochastically in the forward that runs twice."""
    found = []
    for again in (False, True):
        torch.manual_seed(4)
        net = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(16, 8, 1))
        set_products(prepare(net, recipe, include=["*"]), "fp4")
        x = torch.randn(1, 16, 6, 5).requires_grad_()
        (checkpoint(net, x, use_reentrant=False) if again else net(x)).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("recipe", "reasons"),
    [
        (RECIPES["nvfp4_qat"], ["pass straight through", "nvfp4_train"]),
        (Recipe("g", QuantSpec(), None, QuantSpec()), ["weight is not quantised", "dgrad_weight is not quantised"]),
        (
            replace(RECIPES["nvfp4_train"], name="k", activation=QuantSpec("mxfp4")),
            ["forward GEMM have two formats, mxfp4 and nvfp4"],
        ),
        (
            replace(RECIPES["nvfp4_train"], name="s", weight=QuantSpec(block="2d", rounding="stochastic")),
            ["weight rounds 2-D blocks stochastically"],
        ),
    ],
)
def test_recipes_that_cannot_are_refused_with_every_reason(recipe: Recipe, reasons: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        require_packed(recipe)
    assert all(reason in str(refused.value) for reason in [f"'{recipe.name}'", *reasons])
    model = prepare(nn.Sequential(nn.Linear(32, 32)), recipe, include=["0"])
    with pytest.raises(InputError, match=r"train\.products=fp4"):
        set_products(model, "fp4")
    assert set_products(model, "emulated") is model


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(InputError, match="emulated, fp4"):
        set_products(prepare(nn.Sequential(nn.Linear(32, 32)), "tetrajet", include=["0"]), "fp8")


def losses(recipe: str, products: str, steps: int = 50) -> list[float]:
    """A small network with a strided and a transposed convolution, from the same start, on the same batches."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 16, 2, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 2, 1),
    )
    set_products(prepare(model, recipe), products)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    source = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(2, 3, 8, 8, generator=source)
        target = (x[:, 0] * x[:, 1] > 0).long()
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("recipe", ["nvfp4_train", pytest.param("tetrajet", marks=pytest.mark.variants)])
def test_fifty_steps_of_both(recipe: str) -> None:
    """The same random numbers: the first loss is equal up to the sum, and the curves stay together."""
    emulated, packed = losses(recipe, "emulated"), losses(recipe, "fp4")
    assert abs(packed[0] - emulated[0]) <= 1e-6
    apart = max(abs(a - b) for a, b in zip(packed, emulated, strict=True))
    assert apart <= 0.02
    assert sum(packed[-10:]) < sum(packed[:10])


def test_an_operand_survives_being_saved() -> None:
    packed = pack_operand(torch.randn(4, 32), QuantSpec(), (1,))
    back = packed.described().with_tensors(packed.tensors())
    assert isinstance(back, PackedOperand)
    assert torch.equal(back.dequantize(), packed.dequantize())
    assert packed.nbytes == 4 * 32 * 4.5 / 8


@pytest.mark.parametrize(
    ("layer", "kernels"),
    [
        (nn.Conv3d(16, 32, 3, padding=1), ["conv2d", "conv2d", "rows_gemm"]),
        (nn.Conv3d(16, 32, (1, 3, 3), (1, 2, 2), (0, 1, 1)), ["conv2d", "rows_gemm"]),
        (nn.Conv3d(16, 32, 1), ["conv2d", "conv2d", "rows_gemm"]),
        (nn.ConvTranspose3d(16, 32, 2, 2), ["conv_transpose2d", "conv2d", "rows_gemm"]),
        (nn.ConvTranspose3d(16, 32, (1, 2, 2), (1, 2, 2)), ["conv_transpose2d", "conv2d", "rows_gemm"]),
        (nn.Conv3d(16, 32, 3, groups=2), []),
        (nn.Conv2d(16, 32, 3, padding=1), ["conv2d", "conv2d", "rows_gemm"]),
        (nn.Conv2d(16, 32, 3, padding=2, dilation=2), ["conv2d", "conv2d", "rows_gemm"]),
        (nn.ConvTranspose2d(16, 32, 2, 2), ["conv_transpose2d", "conv2d", "rows_gemm"]),
    ],
)
def test_gemms_of_images_and_volumes_go_to_kernels(
    layer: nn.Module, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Y, dX and dW of the reference; kernels are what `dispatch` would launch, computed here by their references."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, *(4, 6, 5)[: layer.weight.ndim - 2]).half().requires_grad_()
    model = prepare(nn.Sequential(layer), "nvfp4_train", include="*").half()
    set_products(model, "fp4")
    called: list[str] = []

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)  # of stochastic rounding
        y = model(x)
        gradient = torch.sin(torch.arange(y.numel())).view(y.shape).half()
        return [y, *torch.autograd.grad(y, (x, *model.parameters()), gradient)]

    def recorded(name: str, run: Any) -> Any:
        return lambda *a, **o: called.append(name) or run(*a, **o)

    def rows(a: Any, b: Any) -> torch.Tensor:
        return torch.einsum("nip,njp->ij", a.dequantize(), b.dequantize())

    expected = step()
    for name in ("conv2d", "conv_transpose2d"):
        monkeypatch.setattr(dispatch.inference, name, recorded(name, getattr(dispatch.inference, name)))
    monkeypatch.setattr(dispatch, "rows_gemm", recorded("rows_gemm", rows))
    monkeypatch.setattr(dispatch, "_has_kernels", lambda _: True)
    for one, other in zip(step(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * float(other.detach().abs().max()))
    assert called == kernels
