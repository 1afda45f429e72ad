"""The largest magnitude of everything that a deployed network holds in the precision of the rest (`rest`), which is
infinite in FP16 beyond 65504.

    with Ranges(model, FP16) as ranges:
        model(images)
    ranges.largest                        {"decoder.attention (bmm)": 131072.0, "first": 12.5, ...}
    ranges.beyond()                       the sentence about what does not fit, or ""

Every operator that a forward calls is seen, with the module that calls it, outside of quantised layers, of which the
result counts. A result that stays FP32 in the files (`graph.wide`) may be of any size: the rule is applied while the
operators run. It costs one more pass over each result.

`automatic_rest` chooses the precision of the rest by it: FP16 where everything fits; where the code of a module leaves
its range, such as an attention without a scale, FP32 for that module (`Rest.wide`); BF16 where a layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from fp4deploy.graph.capture import Inputs
from fp4deploy.graph.copies import copied
from fp4deploy.graph.folding import operator_name
from fp4deploy.graph.wide import casts_operands, is_sum, mask_of, numbers_of
from fp4deploy.qat.batches import run
from fp4deploy.qat.computed import rest_tensors
from fp4deploy.qat.experts import weights_held
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.rest import BF16, FP16, Rest
from fp4deploy.tracing import DispatchMode


@dataclass
class _Result:
    """The largest magnitude of one result, whose sum or square it is of, and whether it stays FP32."""

    place: str
    largest: torch.Tensor
    sources: tuple[_Result, ...] = ()
    wide: bool = False


class Ranges(DispatchMode):
    """Within it, forwards of a model are recorded.

    Attributes:
        largest: the largest finite magnitude by place, in the order of the first call: the layer, or
            "module (operator)" of what a module's code calls; weights and buffers by their names.
    """

    def __init__(self, model: nn.Module, rest: Rest) -> None:
        super().__init__()
        self.model, self.rest = model, rest
        self.largest: dict[str, float] = {}
        self.modules: dict[str, str] = {}  # place -> path of the module whose own code it is; of no layer
        self._path = [""]
        self._inside = 0  # of quantised layers
        self._open: list[_Result] = []  # not yet in `largest`: what reads them may make them FP32
        self._made = WeakTensorKeyDictionary()  # tensor -> its result

    def __enter__(self) -> Ranges:
        self._hooks = list(_hooked(self.model, self._enter, self._leave))
        self._held = weights_held(self.model)  # quantisers are no operators of the network
        self._held.__enter__()
        self.largest |= _parameters(self.model, self.rest)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._held.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._close()

    def _enter(self, name: str, layer: nn.Module) -> None:
        self._path.append(name)
        self._inside += isinstance(layer, QuantizedLayer)
        if len(self._path) == 2:
            self._close()

    def _leave(self, name: str, layer: nn.Module, output: object) -> None:
        self._path.pop()
        self._inside -= isinstance(layer, QuantizedLayer)
        if isinstance(layer, QuantizedLayer) and not self._inside and isinstance(output, torch.Tensor):
            self._record(_Result(name, _largest(output)), output)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, and record what it gives."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._inside:
            return result
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        known = [self._made[each] for each in read if each in self._made]
        if _is_view(func):
            for tensor in tree_leaves(result) if known else ():
                self._made[tensor] = known[0]
            return result
        if casts_operands(func):  # also what was FP32 before
            mask = mask_of(func, args, kwargs)  # which files cast back limited
            read = [each for each in read if each is not mask and each in self._made and self._made[each].wide]
            self._open += [_Result(self._made[each].place, self._made[each].largest) for each in read]
        wide = self._path[-1] in self.rest.wide or (
            not casts_operands(func)
            and (
                any(each.wide for each in known)
                or any(not self.rest.holds(number) for number in numbers_of(func, args, kwargs).values())
                or any(self.rest.is_wide_number(each) for each in read if each not in self._made and _is_floating(each))
            )
        )
        if wide:
            _widen_sums(known)
        sources = tuple(known) if is_sum(func) else ()
        results = tree_leaves(result)
        for tensor in results[:1] if casts_operands(func) else results:  # a norm gives its statistics as well
            if isinstance(tensor, torch.Tensor) and _is_floating(tensor) and tensor.numel():
                if _is_uninitialized(func):  # what is written to it counts, not what the memory held
                    self._made[tensor] = _Result(self._place(func), tensor.new_zeros(()))
                else:
                    self._record(_Result(self._place(func), _largest(tensor), sources, wide), tensor)
        return result

    def _place(self, func: object) -> str:
        name = self._path[-1]
        module = self.model.get_submodule(name)
        own = name and type(module).__module__.startswith("torch.nn.modules")
        place = name if own else f"{name or type(self.model).__name__} ({operator_name(func)})"
        if not (own and any(True for _ in module.parameters(recurse=False))):
            self.modules[place] = name
        return place

    def _record(self, result: _Result, tensor: torch.Tensor) -> None:
        self._made[tensor] = result
        self._open.append(result)

    def _close(self) -> None:
        for result in self._open:
            if not result.wide:
                self.largest[result.place] = max(self.largest.get(result.place, 0.0), float(result.largest))
        self._open.clear()

    def beyond(self, **options: str) -> str:
        """What does not fit, as a sentence with the limit and what to do, as `Rest.beyond`; or ""."""
        return self.rest.beyond(self.largest, **options)


def automatic_rest(model: nn.Module, batches: Iterable[Inputs]) -> Rest:
    """FP16, with the modules in FP32 whose code leaves its range on these inputs; BF16 where that does not suffice.

    model: on any device, of any precision; a copy of it runs on the CPU in FP32. batches: on the CPU. Where a layer's
    result does not fit, or one of its parameters, it is BF16.
    """
    model = copied(model).cpu().float().eval()
    kept, rest = list(batches), FP16
    for _ in range(2):
        ranges = Ranges(model, rest)
        with torch.no_grad(), ranges:
            for batch in kept:
                run(model, (tree_map(torch.clone, batch),))
        beyond = {place for place, size in ranges.largest.items() if size > FP16.largest}
        if not beyond:
            return rest
        if not beyond <= ranges.modules.keys():  # a parameter, or the result of a layer
            break
        rest = replace(FP16, wide=tuple(sorted({ranges.modules[place] for place in beyond})))
    return BF16


def _is_view(func: Any) -> bool:
    """Whether an operator gives the numbers of its first operand in another shape or place."""
    alias = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
    return alias or operator_name(func) in ("_unsafe_view", "clone")


def _is_uninitialized(func: object) -> bool:
    """Whether an operator gives memory as it is: empty, empty_like, new_empty, empty_strided, ..."""
    return "empty" in operator_name(func)


def _hooked(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[Any]:
    for name, module in model.named_modules():
        yield module.register_forward_pre_hook(lambda layer, _, name=name: enter(name, layer), prepend=True)
        after: Any = lambda layer, _, output, name=name: leave(name, layer, output)  # noqa: E731
        yield module.register_forward_hook(after, always_call=True)


def _widen_sums(results: list[_Result]) -> None:
    """Sums and squares that something in FP32 reads are FP32, too."""
    for result in results:
        if result.sources and not result.wide:
            result.wide = True
            _widen_sums(list(result.sources))


def _parameters(model: nn.Module, rest: Rest) -> dict[str, float]:
    return {name: float(_largest(tensor)) for name, tensor in rest_tensors(model, rest) if tensor.numel()}


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude: an infinite one is a mask's."""
    size = x.detach().abs()
    return torch.where(size.isfinite(), size, 0).amax()


def _is_floating(x: torch.Tensor) -> bool:
    return x.is_floating_point()
