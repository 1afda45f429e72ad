"""Which layers read the input of a network, and which give its outputs: by what is executed, not by registration.

    self.head, self.stem = ...              y = self.head(self.body(self.stem(x)))        first "stem", output "head"
    y = low(s) + high(f)                    both give the output
    a = head(x); return a if not self.training else (a, aux(x))        "aux" is not called: neither

A layer counts by its calls. A call is first if the input reaches it without another GEMM layer, and none of these calls
comes before it: parallel stems are all first, a layer that reads the image again further down is not. Whole numbers,
such as token ids and masks, are no image, nor are the rows of an embedding that they choose: a network of tokens has no
first layer. Where an input is known to be a feature map or a volume, linear layers that read other inputs, such as a
text's states in the attention of a UNet, read what another network gives, and are not first. Likewise a call
gives an output if it reaches the output without another one, and none of these calls reads its result: of a residual
stream it is the last branch, of a sum of heads all of them.

The forward is traced symbolically (torch.fx), which needs no input. Where that stops, at code that asks for a size or a
value, it is executed once on an input: the caller's, else zeros of shapes that fit the layers. Where that fails too,
the first and the last layer in the order of registration are assumed, with a warning, unless the network names its
output layers itself, in `output_layers`.

Both work on copies of the modules, without hooks; the parameters are those of the model, buffers are copied.
"""

from __future__ import annotations

import inspect
import io
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fp4deploy.tracing import DispatchMode

HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith("_hooks"))
SIZES = (64, 224, 256, 32, 96, 512)  # of an assumed input, each axis; transformers are often built for 224
MAX_TRIED = 24  # assumed inputs; one that does not fit fails in the first layer
VIEWS = ("getitem", "view", "reshape", "select", "narrow", "transpose", "permute", "unsqueeze", "squeeze", "flatten")

IsGemm = Callable[[nn.Module], bool]
Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
Calls = frozenset[int]
# Among the calls, for an input of the network, and for one that is no map beside one that is.
INPUT, OTHER = -1, -2
MAP_AXES = 4  # of a feature map, at least
INPUT_CALLS: Calls = frozenset({INPUT, OTHER})


@dataclass(frozen=True)
class Ends:
    """Names of the layers that read the input, and of those that give the outputs.

    lent: layers whose weight is read outside of their own calls.
    """

    first: tuple[str, ...]
    outputs: tuple[str, ...]
    lent: frozenset[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True)
class _Origin:
    """What a value comes from. direct: the calls without another one between; all: with those before them."""

    direct: Calls = frozenset()
    all: Calls = frozenset()

    def __or__(self, other: _Origin) -> _Origin:
        return _Origin(self.direct | other.direct, self.all | other.all)


def ends_of(model: nn.Module, is_gemm: IsGemm, example_inputs: Inputs | None = None) -> Ends:
    """The layers at both ends of a network.

    >>> class Two(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.depth, self.head, self.stem = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(3, 16, 3)
    ...
    ...     def forward(self, x):
    ...         x = self.stem(x)
    ...         return self.head(x), self.depth(x).sigmoid()
    >>> ends_of(Two(), lambda layer: isinstance(layer, nn.Conv2d))
    Ends(first=('stem',), outputs=('head', 'depth'))
    """
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(compiled, nn.Module):  # of torch.compile
        inner = ends_of(compiled, is_gemm, example_inputs)
        first, outputs, lent = ([f"_orig_mod.{name}" for name in vars(inner)[each.name]] for each in fields(Ends))
        return Ends(tuple(first), tuple(outputs), frozenset(lent))
    gemms = [name for name, layer in model.named_modules() if is_gemm(layer)]
    if len(gemms) < 2:
        return Ends(tuple(gemms), tuple(gemms))
    given = getattr(model, "output_layers", None)
    named = None if given is None or isinstance(given, nn.Module) else tuple(given)
    with torch.random.fork_rng({each.device for each in model.parameters() if each.is_cuda}):
        others = _without_maps(example_inputs)
        ways = [lambda: _traced(model, is_gemm, others), lambda: _executed(model, is_gemm, example_inputs)]
        if _reads_tokens(model, example_inputs):  # a trace does not know which inputs are whole numbers
            ways.reverse()
        found = ways[0]() or ways[1]()
    assumed = Ends(() if _reads_rows(model, gemms[0]) else (gemms[0],), (gemms[-1],))
    if found is None and named is None:
        _say_assumed(type(model).__name__, *assumed.first, *assumed.outputs)
    ends = found or assumed
    return replace(ends, outputs=named or ends.outputs)


def _without_maps(example_inputs: Inputs | None) -> frozenset[object]:
    """The names or places of inputs that are no feature maps, where another one is."""
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    named = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs or ())
    tensors = {name: each for name, each in named if isinstance(each, torch.Tensor)}
    return frozenset(name for name, each in tensors.items() if _is_beside_a_map(each, tensors.values()))


def _is_beside_a_map(x: torch.Tensor, inputs: Iterable[torch.Tensor]) -> bool:
    return x.ndim < MAP_AXES <= max(each.ndim for each in inputs)


def _reads_tokens(model: nn.Module, example_inputs: Inputs | None) -> bool:
    if example_inputs is None:
        return any(isinstance(layer, nn.Embedding) for layer in model.modules())
    return not all(each.is_floating_point() for each in _tensors(example_inputs))


def _reads_rows(model: nn.Module, name: str) -> bool:
    """Whether the first GEMM layer is a linear one that is registered after an embedding, whose rows it reads."""
    before = itertools.takewhile(lambda each: each[0] != name, model.named_modules())
    after_rows = any(isinstance(layer, nn.Embedding) for _, layer in before)
    return after_rows and not isinstance(model.get_submodule(name), nn.modules.conv._ConvNd)


@lru_cache  # once of each: the filters' own memory is lost by `catch_warnings`
def _say_assumed(network: str, *layers: str) -> None:
    assumed = (
        f"its last layer in the order of registration, {layers[-1]}, is taken for the one that produces the output, "
        "and stays in FP16; none, behind an embedding, for one that reads an image"
    )
    if len(layers) > 1:
        assumed = (
            f"its first and last layer in the order of registration, {' and '.join(layers)}, are taken for those that "
            "read the image and produce the output, and stay in FP16"
        )
    warnings.warn(
        f"The forward of {network} can be neither traced symbolically nor executed on an assumed input: {assumed}. "
        "Give an input of it, example_inputs=x, or name the layers that produce outputs in an attribute "
        'of the network, output_layers = ("head", "depth"); with output_layers = () this is not said.',
        stacklevel=5,
    )


class _Calls:
    """The calls of GEMM layers so far: their names, and what their inputs come from. linear: names of linear layers."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.linear = {name for name, layer in modules.items() if not isinstance(layer, nn.modules.conv._ConvNd)}
        self.names: list[str] = []
        self.inputs: list[_Origin] = []

    def add(self, name: str, read: _Origin) -> _Origin:
        """The origin of the result of a call that reads `read`."""
        self.names.append(name)
        self.inputs.append(read)
        number = len(self.names) - 1
        return _Origin(frozenset({number}), read.all | {number})

    def ends(self, outputs: Iterable[_Origin], lending: Iterable[str]) -> Ends:
        """Both ends. outputs: what those of the network come from; lending: layers whose weight is read elsewhere."""
        images = [INPUT_CALLS - ({OTHER} if name in self.linear else set()) for name in self.names]
        reading = [call for call, read in enumerate(self.inputs) if images[call] & read.direct]
        first = [call for call in reading if not self.inputs[call].all & set(reading)]
        last: list[int] = []
        for output in outputs:
            giving = output.direct - INPUT_CALLS
            last += sorted(call for call in giving if not any(call in self.inputs[other].all for other in giving))
        named = [tuple(dict.fromkeys(self.names[call] for call in calls)) for calls in (first, last)]
        return Ends(named[0], named[1], frozenset(lending))


def _is_product(layer: nn.Module, is_gemm: IsGemm) -> bool:
    """A layer that ends the search: also a subclass of torch's layers that cannot be quantised."""
    return is_gemm(layer) or isinstance(layer, nn.modules.conv._ConvNd | nn.Linear | nn.Bilinear)


def _traced(model: nn.Module, is_gemm: IsGemm, others: frozenset[Any]) -> Ends | None:
    """Both ends from a symbolic trace; None where the forward cannot be traced. others: as of `_without_maps`."""
    try:
        with torch.no_grad(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            copy = _copied(model, {}).eval()
            gemms = {id(layer) for layer in copy.modules() if is_gemm(layer)}
            products = [layer for layer in copy.modules() if _is_product(layer, is_gemm)]
            for each in products:
                each.forward = partial(type(each).__call__, each)  # layer.forward(x) is a call, too
            graph = _Tracer({id(each) for each in products}, gemms).trace(copy)
    except Exception:  # forward is anyone's code, and runs with stand-ins
        return None
    modules = dict(model.named_modules())
    calls, origins = _Calls(modules), dict[fx.Node, _Origin]()
    for node in graph.nodes:
        if node.op == "placeholder":
            origins[node] = _Origin(frozenset({OTHER if {node.target, len(origins)} & others else INPUT}))
            continue
        read = _union(origins.get(each, _Origin()) for each in node.all_input_nodes)
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, nn.Embedding) or node.target is nn.functional.embedding:
            read = _Origin()
        if layer is not None and _is_product(layer, is_gemm):
            read = calls.add(str(node.target), read)
        origins[node] = read
        if _writes(node) and isinstance(written := node.args[0], fx.Node):
            _write(written, read, origins)
    results = tree_leaves(next(node for node in graph.nodes if node.op == "output").args[0])
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    lending = [name for name, layer in modules.items() if is_gemm(layer) and f"{name}.weight" in used]
    return calls.ends([origins[each] for each in results if isinstance(each, fx.Node)], lending)


class _Tracer(fx.Tracer):
    """Keeps GEMM layers as one node each, also those of classes outside torch, and those inside modules of torch."""

    def __init__(self, products: set[int], gemms: set[int]) -> None:
        super().__init__()
        self._products, self._gemms = products, gemms  # by their ids

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if id(m) in self._products:
            return True
        inside = any(id(each) in self._gemms for each in m.modules())
        return super().is_leaf_module(m, module_qualified_name) and not inside


def _writes(node: fx.Node) -> bool:
    """A call in place, such as x[:, 0] = y or x.add_(y)."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and (
        name in ("setitem", "iadd", "imul", "isub", "itruediv") or (name.endswith("_") and not name.endswith("__"))
    )


def _write(written: fx.Node, origin: _Origin, origins: dict[fx.Node, _Origin]) -> None:
    """Add an origin to a value that a call changes, and to the tensors that it is a view of."""
    origins[written] = origins.get(written, _Origin()) | origin
    name = str(written.target) if written.op == "call_method" else getattr(written.target, "__name__", "")
    if (name in VIEWS or _writes(written)) and written.args and isinstance(base := written.args[0], fx.Node):
        _write(base, origin, origins)


def _executed(model: nn.Module, is_gemm: IsGemm, example_inputs: Inputs | None) -> Ends | None:
    """Both ends from one forward in evaluation mode; None where no input makes it run."""
    inputs = [example_inputs] if example_inputs is not None else list(itertools.islice(_assumed(model), MAX_TRIED))
    for meta, each in itertools.product((True, False), inputs):  # without data: nothing is computed
        try:
            with torch.no_grad(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                return _run(model, is_gemm, each, meta)
        except Exception:  # forward is anyone's code
            continue
    return None


def _run(model: nn.Module, is_gemm: IsGemm, inputs: Inputs, meta: bool) -> Ends:
    copy = _copied(model, {}).eval()
    calls = _Calls(dict(copy.named_modules()))
    names = {id(layer): name for name, layer in reversed(list(copy.named_modules()))}
    origins, gemms = _Origins(), {name: layer for name, layer in copy.named_modules() if is_gemm(layer)}
    for layer in copy.modules():
        for name, buffer in layer._buffers.items():
            layer._buffers[name] = None if buffer is None else buffer.to("meta") if meta else buffer
        for name, parameter in layer._parameters.items() if meta else ():
            layer._parameters[name] = None if parameter is None else nn.Parameter(parameter.to("meta"), False)
        if getattr(layer, "fake_quantized", False):
            layer.__dict__["quantizing"] = False  # its scale may not be there yet
        if _is_product(layer, is_gemm):
            layer.forward = partial(_recorded, layer.forward, names[id(layer)], calls, origins)
    moved: Any = _like_parameters(inputs, copy)
    floating = [each for each in _tensors(moved) if each.is_floating_point()]
    for each in floating:
        origins.set(each, _Origin(frozenset({OTHER if _is_beside_a_map(each, floating) else INPUT})))
    with origins:
        if isinstance(moved, Mapping):
            result = copy(**moved)
        else:
            result = copy(moved) if isinstance(moved, torch.Tensor) else copy(*moved)
    lending = [name for name, layer in gemms.items() if origins.has_read(layer.weight)]
    return calls.ends([origins.of(each) for each in _tensors(result)], lending)


def _recorded(forward: Any, name: str, calls: _Calls, origins: _Origins, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer, as one call; that it reads its own weight lends it to nobody."""
    before = set(origins.read)
    result = forward(*args, **kwargs)
    origins.read = before
    origins.set(result, calls.add(name, origins.of((args, kwargs))))
    return result


class _Origins(DispatchMode):
    """Origins of the tensors of a forward, by their storages: views, and what is written in place, share one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, _Origin] = {}
        self.alive: list[Any] = []  # an address stands for one storage while that exists
        self.read: set[int] = set()

    def of(self, values: object) -> _Origin:
        return _union(self.found.get(self._key(each), _Origin()) for each in _tensors(values))

    def set(self, values: object, origin: _Origin) -> None:
        for each in _tensors(values):
            self.found[self._key(each)] = origin

    def has_read(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and self._key(tensor) in self.read

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        return int(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        origin = self.of((args, kwargs))
        self.read.update(map(self._key, _tensors((args, kwargs))))
        if origin.direct or origin.all:
            written = [
                given
                for argument, given in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for each in _tensors((result, written)):
                key = self._key(each)
                self.found[key] = self.found.get(key, _Origin()) | origin
        return result


def _tensors(values: object) -> Iterator[torch.Tensor]:
    """The tensors in anything that a forward takes or returns."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, each.name) for each in fields(leaf)])


def _union(origins: Iterable[_Origin]) -> _Origin:
    found = _Origin()
    for each in origins:
        found |= each
    return found


def _like_parameters(inputs: Inputs, model: nn.Module) -> Inputs:
    """The inputs on the device of the parameters, and floating-point ones in their type; copies."""
    parameter = next(each for each in model.parameters() if each.is_floating_point())

    def moved(x: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(x.shape, dtype=x.dtype) if x.is_meta and not parameter.is_meta else x.detach().clone()
        return x.to(parameter.device, parameter.dtype if x.is_floating_point() else x.dtype)

    return cast(Inputs, tree_map_only(torch.Tensor, moved, inputs))


def _assumed(model: nn.Module) -> Iterator[tuple[torch.Tensor, ...]]:
    """Inputs that could fit, the likely ones first: zeros of the channels and axes that layers take."""
    kinds = inspect.Parameter
    arguments = inspect.signature(model.forward).parameters.values()
    positional = [each for each in arguments if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    count = max(1, sum(each.default is kinds.empty for each in positional))
    if any(isinstance(layer, nn.Embedding) for layer in model.modules()):
        yield (torch.zeros((2, 8), dtype=torch.int64),) * count  # token ids
    for size in SIZES:
        for shapes in itertools.product(_shapes(model, size), repeat=count):
            yield tuple(torch.zeros(shape) for shape in shapes)


def _shapes(model: nn.Module, size: int) -> list[tuple[int, ...]]:
    """Shapes of one input, by the layers in order of registration; few channels first, an image has few."""
    found: list[tuple[int, ...]] = []
    for layer in model.modules():
        if isinstance(layer, nn.modules.conv._ConvNd):
            found.append(
                (
                    2,
                    layer.in_channels,
                    *(min(size, 32) if len(layer.kernel_size) == 3 else size,) * len(layer.kernel_size),
                )
            )
    channels = sorted(dict.fromkeys(found), key=lambda shape: shape[1])
    if channels:
        return channels[:4]
    features = dict.fromkeys(layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear))
    return [shape for each in list(features)[:2] for shape in ((2, each), (2, 8, each))] if size == SIZES[0] else []


def _copied(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """The module and its children as objects of their own without hooks, sharing all that they hold but buffers."""
    if id(module) not in copies:
        copy = copies[id(module)] = module.__class__.__new__(module.__class__)
        copy.__dict__.update(module.__dict__)
        copy.__dict__.update({name: OrderedDict[int, Any]() for name in HOOKS})
        copy.__dict__["_parameters"] = dict(module._parameters)
        copy.__dict__["_buffers"] = {
            name: None if each is None else each.clone() for name, each in module._buffers.items()
        }
        copy.__dict__["_modules"] = dict(_children(module, copies))
        others = {name: each for name, each in module.__dict__.items() if isinstance(each, nn.Module)}
        copy.__dict__.update({name: _copied(each, copies) for name, each in others.items()})  # as of `attention`
    return copies[id(module)]


def _children(module: nn.Module, copies: dict[int, nn.Module]) -> Iterable[tuple[str, nn.Module | None]]:
    for name, child in module._modules.items():
        yield name, None if child is None else _copied(child, copies)
