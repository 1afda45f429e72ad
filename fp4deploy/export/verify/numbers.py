"""Numbers in a network's code, in FP16, or what else the rest is, as its file holds them.

    q = q * self.dim**-0.5          0.17677669 in torch, 0.17675781 in the file

A file of FP16 operators has FP16 constants. The parameters of the torch model that it is compared with are rounded to
FP16 beforehand (`qat.deployed`); a number that stands in `forward` is rounded here, while the model runs. A relative
difference of 1e-4 before a softmax changes more codes of the layers behind it than the comparison allows. A number that
FP16 does not hold (`fp4deploy.rest`) is FP32 in the file, and stays as it is.

So is what the code computes from parameters alone, such as a standardised weight, where it meets an activation: the
file holds the result (`graph.folding`).

Where code asks for FP32, by `x.float()`, `torch.arange(n, dtype=torch.float32)` or `torch.linspace(-1, 1, n)`, whose
type is the default, or of whole numbers, as in `torch.arange(n) / n`, the file computes in FP32, until the code casts
back: with numbers, and what is computed from parameters, as they are. `1.0 + self.weight.float()` is an FP32 constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from fp4deploy.qat import quantized_layers
from fp4deploy.qat.experts import weights_held
from fp4deploy.rest import POSITIONS, Rest

_NAMES = ("add", "sub", "mul", "div", "rsub", "true_divide", "multiply", "subtract", "divide")
_METHODS = (*_NAMES, "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__")
_OPERANDS = (  # whose numbers are operands of ONNX's operators, in the type of the others; not attributes, in FP32
    *("clamp", "clamp_", "clamp_min", "clamp_max", "clip", "masked_fill", "masked_fill_", "where", "lerp", "addcmul"),
    *(
        "addcdiv",
        "pow",
        "__pow__",
        "__rpow__",
        "remainder",
        "fmod",
        "__mod__",
        "hardtanh",
        "softplus",
        "softshrink",
        "pad",
    ),
)
ARITHMETIC = {
    getattr(place, name)
    for place in (torch, torch.Tensor, F)
    for name in (*_METHODS, *_IN_PLACE, *_OPERANDS)
    if hasattr(place, name)
}
DTYPE, DEVICE = torch.Tensor.dtype.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]
FLOAT = torch.Tensor.float
FACTORIES = (torch.arange, torch.linspace)
OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.full)
OF_NUMBERS_LIKE = (torch.full_like, torch.Tensor.new_full, torch.Tensor.new_tensor)
CASTS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as, torch.Tensor.half, torch.Tensor.bfloat16)


class _RestNumbers(TorchFunctionMode):
    """Functions of a tensor and a number that is an operand in the file, outside of quantised layers (`inside`).

    computed: the tensors that are computed from `parameters`, which has buffers, too, or positions, and from nothing
    else. wide: those that are FP32 in the file since the code says so.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], rest: Rest) -> None:
        super().__init__()
        self.rest = rest
        self.inside = 0
        self.parameters = WeakTensorKeyDictionary(dict.fromkeys(parameters, True))
        self.computed, self.wide = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.of_a_tensor = False  # the type of one was just read: zeros(2, dtype=x.dtype)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, with a number or computed tensors in the rest's precision."""
        kwargs = kwargs or {}
        if self.inside or func in (DTYPE, DEVICE):  # zeros(2, dtype=x.dtype, device=x.device)
            self.of_a_tensor = func == DTYPE or (func == DEVICE and self.of_a_tensor)
            return func(*args, **kwargs)
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        sources = read[:1] if func is torch.Tensor.type_as else read
        computed = (
            func in FACTORIES
            or (func in OF_NUMBERS and not read)
            or (func in OF_NUMBERS_LIKE and len(read) == 1)
            or (bool(sources) and all(each in self.parameters or each in self.computed for each in sources))
        )
        wide = any(each in self.wide for each in read)
        if not computed and not wide and func in ARITHMETIC and any(_is_floating(each) for each in args):
            args, kwargs = tree_map_only(float, self.rest.rounded, (args, kwargs))
        if not computed and any(each in self.computed for each in read):
            args, kwargs = tree_map_only(torch.Tensor, self._rounded, (args, kwargs))
        of_a_tensor = self.of_a_tensor and kwargs.get("dtype") is torch.float32  # that of the rest in the file
        narrow = of_a_tensor and func in FACTORIES and self.rest.whole >= POSITIONS  # else FP32 (`graph.wide`)
        result = func(*args, **kwargs | {"dtype": self.rest.dtype}).float() if narrow else func(*args, **kwargs)
        if func in (FLOAT, *CASTS) and result is args[0]:  # of this type already: another tensor, which may be wide
            result = torch.ops.aten.alias.default(result)
        whole = bool(read) and not any(map(_is_floating, read))  # of which torch computes FP32
        given = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        of_numbers = func in OF_NUMBERS and not read and not of_a_tensor
        made = func in FACTORIES or (of_numbers and given[0].ndim > 0)  # others: a number
        asked = (made and not narrow) or (whole and not of_a_tensor and func not in CASTS)
        found = [each for each in given if _is_floating(each)]
        self.computed.update(dict.fromkeys(given if computed else (), True))
        self.wide.update(dict.fromkeys(found if (wide and func not in CASTS) or func is FLOAT or asked else (), True))
        self.of_a_tensor = False
        return result

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        narrow = x in self.computed and x not in self.wide and _is_floating(x) and self.rest.holds_tensor(x)
        return x.to(self.rest.dtype).to(x.dtype) if narrow else x

    def enter(self, *_: object) -> None:
        """The first hook of a quantised layer, whose formulas are not the network's code."""
        self.inside += 1

    def leave(self, *_: object) -> None:
        """The last hook of a quantised layer."""
        self.inside -= 1


@contextmanager
def rest_numbers(model: nn.Module, rest: Rest) -> Iterator[None]:
    """Inside, the code of a model computes with numbers in the precision of the rest."""
    mode, handles = _RestNumbers([*model.parameters(), *model.buffers()], rest), []
    for layer in quantized_layers(model).values():
        handles.append(layer.register_forward_pre_hook(mode.enter, prepend=True))
        handles.append(layer.register_forward_hook(mode.leave, always_call=True))
    try:
        with weights_held(model), mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
