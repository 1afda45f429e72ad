"""A module as a graph: torch.export of a copy, in evaluation mode, read node by node.

The training IR that torch.export gives keeps every call of the user's code as one ATen call. In-place calls are made
functional first (`rewrites`), so that a node never changes a value that others read.

Sizes: the first axis of every input is one dynamic batch. With `dynamic_size` height and width (every axis from the
third on) are dynamic as well, as far as the module allows: where its code fixes one, torch.export keeps that axis
fixed.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from fp4deploy.errors import InputError
from fp4deploy.graph.copies import for_capture
from fp4deploy.graph.finite import finite
from fp4deploy.graph.fixed_axes import Specializing, fixed_axis
from fp4deploy.graph.growth import BoundedSizes, undecided, unsettled
from fp4deploy.graph.ir import COMPUTED, Graph, Node, Value
from fp4deploy.graph.open_axes import divided
from fp4deploy.graph.operators import ALIAS, NO_OUTPUT, Call, Step, is_known, parts_of, steps_of
from fp4deploy.graph.own_linear import call_linear
from fp4deploy.graph.replacement import Rewriting
from fp4deploy.graph.rewrites import decomposed, inline_regions, made_functional
from fp4deploy.graph.sizes import Size, SizeError, axes_of, size_of
from fp4deploy.graph.unpooling import unpooling
from fp4deploy.tracing import make_no_folder

PRODUCTS = ("linear", *(f"{kind}{axes}d" for kind in ("conv", "conv_transpose") for axes in (1, 2, 3)))
USED_BY_TORCH = ("sympy", "onnx_ir", "onnxscript")  # by its tracing and its exporter
DECOMPOSITIONS = 4  # rounds: a decomposition may give calls that are to be decomposed as well
Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


Dynamic = Mapping[str, Iterable[int]]  # input -> its open axes behind the batch


def capture(
    model: nn.Module,
    example_inputs: Inputs,
    dynamic_size: bool = False,
    kept: Collection[str] = (),
    dynamic: Dynamic | None = None,
    batch: int | None = None,
) -> Graph:
    """The graph of a module in evaluation mode; the module is not changed.

    Args:
        model: any module without fake-quantised layers, which `qat.restore` turns into plain ones.
        example_inputs: a tensor, several in the order of its forward, or by the names of its arguments. Shapes and
            types are read, values are not. The first axis is the batch, which is dynamic.
        dynamic_size: height and width are dynamic too.
        kept: layers whose products are nodes even where no input of the network has a part in them; else these are
            constants.
        dynamic: more axes that are dynamic, and an error where the module fixes one.
        batch: the only number of samples; None: any.

    Raises:
        InputError: fake-quantised layers; no such inputs; control flow that depends on values, with the line it is in;
            another failure of torch.export; an output that holds something else than tensors.
        UnsettledSizes: `dynamic_size`, and sizes that are too long formulas of the input's (`graph.growth`).

    >>> graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 8, 8))
    >>> [(node.op, node.layer) for node in graph.nodes]
    [('conv', '0'), ('relu', '1')]
    """
    _refuse_fake_quantized(model)
    positional, named = arguments(example_inputs, batch)
    program = _export(model, positional, named, dynamic_size, dynamic or {}, batch)
    with quiet():
        inline_regions(program)
        if not made_functional(program):
            program = program.run_decompositions({})
    return _Reader(_decomposed(program), kept).graph()


def _refuse_fake_quantized(model: nn.Module) -> None:
    """The graph would be that of the quantisers, 140 nodes a layer, which take minutes to trace with free sizes."""
    found = [name or "itself" for name, each in model.named_modules() if getattr(each, "fake_quantized", False)]
    if found:
        raise InputError(
            f"{type(model).__name__} has fake-quantised layers ({len(found)}; the first: {found[0]}), whose graph "
            "would be that of their quantisers. Capture the plain network, fp4deploy.restore(copy.deepcopy(model)); "
            "fp4deploy.export_onnx and fp4deploy.pack take the prepared one."
        )


def arguments(
    example_inputs: Inputs, batch: int | None = None
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Example inputs as (positional, by name), on the CPU, with a batch of at least two, or of `batch`.

    Raises:
        InputError: they are no tensors with a batch axis.
    """
    named = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
    single = isinstance(example_inputs, torch.Tensor)
    positional: tuple[Any, ...] = () if named else (example_inputs,) if single else tuple(example_inputs)
    tensors: tuple[Any, ...] = (*positional, *named.values())
    if not tensors or any(not isinstance(x, torch.Tensor) or x.ndim < 1 or 0 in x.shape for x in tensors):
        raise InputError(
            "example_inputs is a tensor, a tuple of tensors or a dict of tensors, each with a batch axis, such as "
            "torch.zeros(1, 3, 256, 256)."
        )
    # A batch of 1 would be taken for a constant.
    several = [_rows(x.detach().cpu(), batch or max(2, len(x))) for x in tensors]
    count = len(positional)
    return tuple(several[:count]), dict(zip(named, several[count:], strict=True))


Given = TypeVar("Given", bound=Inputs)


def of_batch(inputs: Given, batch: int | None) -> Given:
    """Inputs of so many samples, repeated or cut; as they are where it is None."""
    return inputs if batch is None else tree_map(lambda x: _rows(x, batch), inputs)


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return x if len(x) == count else x[torch.arange(count) % len(x)]


def argument_names(model: nn.Module, count: int) -> list[str]:
    """What the forward calls the first `count` of its arguments, of several positional ones too."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return (names + [f"input_{number}" for number in range(len(names), count)])[:count]


def require_axes(dynamic: Dynamic, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse open axes that no input has.

    Raises:
        InputError: with the inputs and the axes that they have behind the batch.
    """
    for name, axes in dynamic.items():
        if name not in tensors or any(not 0 < axis < tensors[name].ndim for axis in axes):
            valid = ", ".join(f"'{each}' with the axes 1 to {x.ndim - 1}" for each, x in tensors.items())
            raise InputError(f"dynamic names the axes {[*axes]} of '{name}'. Inputs: {valid}.")


def _export(
    model: nn.Module,
    positional: tuple[torch.Tensor, ...],
    named: dict[str, torch.Tensor],
    dynamic_size: bool,
    dynamic: Dynamic,
    batch: int | None,
) -> torch.export.ExportedProgram:
    tensors = named or dict(zip(argument_names(model, len(positional)), positional, strict=True))
    require_axes(dynamic, tensors)

    def shapes(most: int | None = None) -> Any:
        several = {} if batch else {0: torch.export.Dim("batch", min=1, max=most)}

        def axes(name: str, x: torch.Tensor) -> dict[int, Any]:
            sizes = dict.fromkeys(range(2, x.ndim), torch.export.Dim.AUTO) if dynamic_size else {}
            return several | sizes | dict.fromkeys(dynamic.get(name, ()), torch.export.Dim.DYNAMIC)

        found = {name: axes(name, x) for name, x in tensors.items()}
        return found if named else tuple(found.values())

    def exported(most: int | None = None) -> torch.export.ExportedProgram:
        return torch.export.export(plain, positional, named, dynamic_shapes=shapes(most), strict=False)

    plain = for_capture(model)
    call_linear(plain)
    bound, specializing, most = BoundedSizes(), Specializing(plain), None
    make_no_folder()
    try:
        with (
            quiet(), torch.no_grad(), bound if dynamic_size else nullcontext(), specializing,
            Rewriting(divided(pools=False), unpooling(), finite()),
        ):  # fmt: skip
            try:
                program = exported()
            except Exception as error:
                most = _largest_batch(error)
                if most is None:
                    raise
                program = exported(most)
    except OSError:  # of the machine, such as no room for temporary files
        raise
    except Exception as error:
        unsolved = undecided(error) if dynamic_size else None
        if ended := bound.error or unsolved:
            advice = "Capture it with a fixed size: dynamic_size=False."
            raise unsettled(type(model).__name__, place_of(ended), advice, ended is not unsolved) from error
        raise InputError(why_not_captured(model, error, lambda: specializing)) from error
    if axis := fixed_axis(program):
        raise InputError(fixes_an_axis(type(model).__name__, axis, specializing))
    if most is not None:
        warnings.warn(
            f"{type(model).__name__} goes another way for a batch above {most}; captured is that of smaller ones.",
            stacklevel=4,
        )
    return program


def _largest_batch(error: Exception) -> int | None:
    """The batch up to which a network goes one way, where that is all that torch.export says against it.

    Such as `if x.shape[0] >= 64: x = x.contiguous()` of diffusers. torch suggests "batch = Dim('batch', max=63)".
    """
    found = re.search(r"Suggested fixes:\s+batch = Dim\('batch', max=(\d+)\)\s*$", str(error).partition("\n\n")[0])
    return int(found[1]) if found else None


def why_not_captured(model: nn.Module, error: Exception, watched: Callable[[], Specializing] | None = None) -> str:
    """One paragraph: what failed, in which line of the user's code, and what to do; watched: what saw a size fixed."""
    place = place_of(error) or _place_of_node(error)
    kind = type(model).__name__
    message = str(error)
    if (
        "data-dependent" in message
        or "GuardOnDataDependent" in type(error).__name__
        or "_local_scalar_dense" in message
    ):
        return (
            f"{kind} decides by values of its tensors which way to go{place}, so that it is not one graph. Write the "
            "decision with torch.where, or let it depend on shapes and settings of the module."
        )
    asked = re.sub(r"L(?:\['\w+'\])*\['(\w+)'\]\.size\(\)\[(\d+)\]", r"axis \2 of \1", message)
    if fixed := re.match(r"Constraints violated \(([\w, ]+)\)", asked):
        return fixes_an_axis(kind, fixed[1], watched and watched())
    if "user-specified ranges and inferred ranges" in message or "inconsistencies were found" in message:
        return fixes_an_axis(kind, "height or width", watched and watched())
    if untyped := re.search(r"Found <class '([\w.]+)'> in output", message):
        kept = untyped[1].rpartition(".")[2]
        advice = "Return tensors, or a tuple or dict of them."
        if "cache" in kept.lower():
            advice = (
                "Export it without the cache of keys and values: model.config.use_cache = False, or use_cache=False in "
                "its configuration; the file then computes a whole sequence in each call. Or with a cache of tensors: "
                "fp4deploy.with_cache(model)."
            )
        return f"{kind} returns a {kept}, which is no tensor. {advice}"
    if "translating node return" in message:
        return f"{kind} returns something that is no tensor. Return tensors, or a tuple or dict of them."
    if untranslated := re.search(r"translating node .*target=torch\.ops\.(.+?)\]", message):
        return f"torch's ONNX exporter does not know {untranslated[1]}, which {kind} calls{place}. Write it otherwise."
    first = next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
    cause = first.partition(" For more information")[0].rstrip(".!")[:300]
    return f"torch.export cannot capture {kind}{place}: {cause}. Check the example inputs' shapes and types."


def fixes_an_axis(kind: str, axis: str, specializing: Specializing | None = None) -> str:
    """Of a network that was traced for one size of an axis; specializing: what watched the tracing."""
    call = f" at {specializing.call}{line_of(specializing.frames)}" if specializing and specializing.call else ""
    return (
        f"{kind} takes the size of an axis ({axis}) for a constant{call}, and it may change. Read it from x.shape. "
        "These fix it: len(x), int(x.shape[0]), a loop over the axis, a window of its size, a size that is a number. "
        "Height and width may stay fixed: dynamic_size=False, without --dynamic-size."
    )


def place_of(error: BaseException) -> str:
    """The last line of the user's code in the traceback, as " (net.py, line 12)"; "" where there is none."""
    return line_of((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))


def line_of(frames: Iterable[tuple[str, int]]) -> str:
    """The innermost line of the user's code, as " (net.py, line 12)"; "" if there is none.

    Args:
        frames: file and line of each, the outermost first.
    """
    own = [(file, line) for file, line in frames if _is_users(file)]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _place_of_node(error: Exception) -> str:
    """The line of the user's code that made the node that an exporter was at; "" where it is not known."""
    found = [frame.f_locals.get("node", frame.f_locals.get("n")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [_where(node) for node in found if isinstance(node, fx.Node)]
    return f" ({places[-1]})" if places and places[-1] else ""


def _is_users(file: str) -> bool:
    tracing = Path(__file__).parent, Path(__file__).parents[1] / "export"
    own = (str(Path(torch.__file__).parent), *map(str, tracing), sysconfig.get_paths()["stdlib"])
    if any(f"/site-packages/{each}/" in Path(file).as_posix() for each in USED_BY_TORCH):
        return False
    return "site-packages" in file.removeprefix(own[0]) if file.startswith(own) else not file.startswith("<")


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with calls that are no known operation decomposed by torch's own table, as far as it has them."""
    for _ in range(DECOMPOSITIONS):
        targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
        calls = {each for each in targets if isinstance(each, torch._ops.OpOverload)}
        unknown = {each for each in calls if not is_known(_name(each), each._overloadname)}
        if not unknown:
            return program
        table = torch.export.default_decompositions()
        chosen: dict[Any, Any] = {target: table[target] for target in unknown if target in table}
        chosen |= {target: target.decompose for target in unknown - set(chosen) if target._can_decompose()}
        if not chosen:
            return program
        with quiet():
            if not decomposed(program, lambda node: node.target in chosen, chosen):  # noqa: B023
                program = program.run_decompositions(chosen)
    return program


def _name(operator: torch._ops.OpOverload) -> str:
    return operator._schema.name.partition("::")[2]


class _Reader:
    """From an exported program to nodes."""

    def __init__(self, program: torch.export.ExportedProgram, kept: Collection[str]) -> None:
        self.program, self.kept = program, kept
        signature = program.graph_signature
        self.parameters: dict[str, str] = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        self.inputs = tuple(signature.user_inputs)
        self.symbols: dict[Any, Size] = {}
        self.example: dict[str, int] = {}
        self.tensors: dict[str, tuple[str, bool]] = {}  # fx node -> (value or parameter, is a value)
        self.parts: dict[str, list[str]] = {}
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}
        self.known: dict[str, Any] = {}  # fx node -> its value, where no input of the network has a part in it
        self.constants: dict[str, torch.Tensor] = {}

    def graph(self) -> Graph:
        outputs: tuple[tuple[str, str], ...] = ()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs = self._outputs(node)
        inputs = tuple(str(name) for name in self.inputs)
        self._check_sizes()
        return self._pruned(Graph(inputs, tuple(self.nodes), outputs, self.values, self.example, self.constants))

    def _placeholder(self, node: fx.Node) -> None:
        if node.name in self.parameters:
            name = self.parameters[node.name]
            own = name in self.program.state_dict
            value = self.program.state_dict[name] if own else self.program.constants[name]
            self.known[node.name] = value
            self.tensors[node.name] = name, False
            if not own:
                self.constants[name] = value
            return
        if node.name not in self.inputs or not isinstance(node.meta.get("val"), torch.Tensor):
            raise InputError(
                f"The input '{node.name}' is no tensor. Give tensors, and set anything else in the module."
            )
        example = node.meta["val"]
        for axis, size in enumerate(example.shape):
            self._symbol(f"{node.name}.{axis}", size)
        self._value(node.name, example)
        self.tensors[node.name] = node.name, True

    def _symbol(self, axis: str, size: int | torch.SymInt) -> None:
        """Learn what a symbol of torch.export is in terms of an axis: s, or k s + c, of which k s is usual."""
        if isinstance(size, int):
            self.example[axis] = size
            return
        expression = size.node.expr
        self.example[axis] = int(size.node.hint)
        if expression.is_Symbol:
            self.symbols.setdefault(expression, (axis,))
            return
        symbols = list(expression.free_symbols)
        if len(symbols) == 1 and symbols[0] not in self.symbols:
            factor = expression.coeff(symbols[0])
            if factor.is_Integer and expression == factor * symbols[0]:
                self.symbols[symbols[0]] = (axis, int(factor), "//")

    def _value(self, name: str, tensor: torch.Tensor) -> None:
        self.values[name] = Value(name, self._shape(name, tensor), tensor.dtype)

    def _shape(self, name: str, tensor: torch.Tensor) -> tuple[Size, ...]:
        try:
            return tuple(size_of(size, self.symbols) for size in tensor.shape)
        except SizeError as error:
            raise InputError(
                f"The shape of '{name}' cannot be followed: {error}. Capture it with a fixed size."
            ) from None

    def _call(self, node: fx.Node) -> None:
        if self._computed(node):
            return
        if node.target is operator.getitem:
            source, index = node.args
            found = self.parts.get(source.name) if isinstance(source, fx.Node) else None
            if found is not None and isinstance(index, int) and index < len(found):
                self.tensors[node.name] = found[index], True
            elif found is not None and isinstance(node.meta.get("val"), torch.Tensor):
                whole = next(each for each in self.nodes if each.name == found[0])
                own = whole.op.startswith("aten.")  # what nodes of other operators give besides has no node
                operator_of = whole.op if own else f"aten.{cast('fx.Node', source).target}, result {index}"
                more = {**whole.attributes, "result": index}
                self.nodes.append(replace(whole, name=node.name, op=operator_of, attributes=more, where=_where(node)))
                self._value(node.name, node.meta["val"])
                self.tensors[node.name] = node.name, True
            return
        value = node.meta.get("val")
        schema = getattr(node.target, "_schema", None)
        if schema is None or value is None or isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat)):
            return  # arithmetic of sizes: read where it is used
        name = schema.name.partition("::")[2]
        if name in NO_OUTPUT:
            return
        call = self._bound(node, schema, name)
        if isinstance(value, torch.Tensor):
            self._emit(node, call, steps_of(call), node.name)
            return
        parts = parts_of(call)
        if parts is not None:
            self.parts[node.name] = [self._add(node, call, step, f"{node.name}.{at}") for at, step in enumerate(parts)]
            return
        self.parts[node.name] = [self._emit(node, call, steps_of(call), node.name)]  # such as (normalised, mean, rstd)

    def _computed(self, node: fx.Node) -> bool:
        """Compute a call that depends on no input of the network: its result is a constant."""
        if any(each.name not in self.known for each in node.all_input_nodes) or self._is_kept(node):
            return False
        if node.target is not operator.getitem:
            drawn = torch.Tag.nondeterministic_seeded
            if not isinstance(node.target, torch._ops.OpOverload) or drawn in node.target.tags:
                return False
        arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: self.known[each.name])
        with torch.no_grad():
            value = cast("Callable[..., object]", node.target)(*arguments, **named)
        if isinstance(value, torch.Tensor) and "empty" in str(node.target):  # uninitialised: the same bytes each time
            value = torch.zeros_like(value)
        self.known[node.name] = value
        if isinstance(value, torch.Tensor):
            name = f"{COMPUTED}{node.name}"
            self.tensors[node.name] = name, False
            self.constants[name] = value
        return True

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether a call is the product of a kept layer."""
        if not self.kept or getattr(node.target, "__name__", "").partition(".")[0] not in PRODUCTS:
            return False
        read = (self.tensors[each.name][0] for each in node.all_input_nodes if each.name in self.tensors)
        owners = {name.removesuffix(".weight") for name in read if name.endswith(".weight")}
        return any(each in self.kept for each in (*owners, module_of(node)))

    def _bound(self, node: fx.Node, schema: torch.FunctionSchema, name: str) -> Call:
        tensors: dict[str, tuple[str, bool]] = {}
        shapes: dict[str, tuple[Size, ...]] = {}
        arguments: dict[str, Any] = {}

        def bind(role: str, given: object) -> None:
            if isinstance(given, fx.Node) and given.name in self.tensors:
                tensors[role] = self.tensors[given.name]
                shapes[role] = self._shape(given.name, given.meta["val"])
            elif isinstance(given, (list, tuple)) and any(self._is_tensor(each) for each in given):
                for at, each in enumerate(given):
                    bind(f"{role}.{at}", each)
            elif not (given is None and role in TENSOR_ROLES):
                arguments[role] = self._constant(given)

        for at, argument in enumerate(schema.arguments):
            given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name, _default(argument))
            bind(argument.name, given)
        value = node.meta["val"]
        several: tuple[tuple[Size, ...], ...] = ()
        if not isinstance(value, torch.Tensor):
            tensors_out = [each for each in value if isinstance(each, torch.Tensor)]
            several = tuple(self._shape(node.name, each) for each in tensors_out)
            value = tensors_out[0]
        return Call(node.name, name, tensors, arguments, shapes, self._shape(node.name, value), value.dtype, several)

    def _is_tensor(self, given: object) -> bool:
        return isinstance(given, fx.Node) and given.name in self.tensors

    def _constant(self, given: object) -> Any:
        if isinstance(given, fx.Node):
            value = given.meta.get("val")
            try:
                return size_of(value, self.symbols) if isinstance(value, (int, torch.SymInt)) else value
            except SizeError as error:
                raise InputError(f"'{given.name}' cannot be followed: {error}. Capture it with a fixed size.") from None
        return tuple(self._constant(each) for each in given) if isinstance(given, (list, tuple)) else given

    def _emit(self, node: fx.Node, call: Call, steps: list[Step] | None, name: str) -> str:
        """Add the nodes of a call, and remember what its output is called."""
        if steps and steps[0].op == ALIAS:
            self.tensors[node.name] = call.tensors[str((steps[0].roles or {})["input"])]
            return self.tensors[node.name][0]
        first = next((each for each in call.tensors.values() if each[1]), None)
        same_type = first is not None and self.values[first[0]].dtype == call.dtype
        if steps == [] or (steps and steps[0].op == "cast" and same_type):
            self.tensors[node.name] = next(iter(call.tensors.values()))
            return self.tensors[node.name][0]
        made: list[str] = []
        for at, step in enumerate(steps or [Step(f"aten.{call.op}", dict(call.arguments))]):
            last = at == len(steps or [None]) - 1
            within = f"{name}.{step.op}" + (f".{at}" if at else "")
            made.append(self._add(node, call, step, name if last else within, made))
        self.tensors[node.name] = made[-1], True
        return made[-1]

    def _add(self, node: fx.Node, call: Call, step: Step, name: str, made: Sequence[str] = ()) -> str:
        """Add the node of a step; made: the nodes of the steps before."""
        roles = {role: role for role in call.tensors} if step.roles is None else step.roles
        given: dict[str | int, tuple[str, bool]] = {role: each for role, each in call.tensors.items()}  # noqa: C416
        given.update({at: (each, True) for at, each in enumerate(made)})
        read = {_role(role): given[source] for role, source in roles.items() if source in given}
        if step.after:
            read["input"] = made[-1], True
        for role, constant in step.constants.items():
            read[role] = f"{COMPUTED}{name}.{role}", False
            self.constants[read[role][0]] = constant
        inputs = {role: value for role, (value, is_value) in read.items() if is_value}
        parameters = {role: value for role, (value, is_value) in read.items() if not is_value}
        layer, where = _layer(node, parameters), _where(node)
        self.nodes.append(Node(name, step.op, inputs, parameters, step.attributes, layer, where))
        self.values[name] = Value(name, call.shape if step.shape is None else step.shape, call.dtype)
        return name

    def _outputs(self, node: fx.Node) -> tuple[tuple[str, str], ...]:
        returned = self.program.graph_signature.user_outputs
        names = output_names(self.program, len(returned))
        found = []
        for name, output in zip(names, returned, strict=True):
            if not isinstance(output, str) or output not in self.tensors or not self.tensors[output][1]:
                raise InputError(
                    f"The output {name or 'of the module'} is no tensor computed from its inputs. Return tensors, or a "
                    "tuple or dict of tensors."
                )
            found.append((name, self.tensors[output][0]))
        return tuple(found)

    def _check_sizes(self) -> None:
        known = set(self.example)
        for value in self.values.values():
            unknown = axes_of(value.shape) - known
            if unknown:
                raise InputError(f"The shape of '{value.name}' depends on {', '.join(sorted(unknown))}.")

    @staticmethod
    def _pruned(graph: Graph) -> Graph:
        """Without the nodes that no output depends on."""
        needed = {value for _, value in graph.outputs}
        kept: list[Node] = []
        for node in reversed(graph.nodes):
            if node.name in needed:
                needed.update(node.inputs.values())
                kept.append(node)
        values = {name: value for name, value in graph.values.items() if name in needed or name in graph.inputs}
        read = {name for node in kept for name in node.parameters.values()}
        constants = {name: value for name, value in graph.constants.items() if name in read}
        return Graph(graph.inputs, tuple(reversed(kept)), graph.outputs, values, graph.example, constants)


TENSOR_ROLES = ("weight", "bias", "running_mean", "running_var", "attn_mask")


def _role(role: str) -> str:
    return "input" if role == "self" else role


def _default(argument: torch.Argument) -> object:
    return argument.default_value if argument.has_default_value() else None


def _layer(node: fx.Node, parameters: Mapping[str, str]) -> str:
    owned = {role: name for role, name in parameters.items() if not name.startswith(COMPUTED)}
    if not owned.get("weight", ".weight").endswith(".weight"):  # of another module: attention's `q_proj_weight`
        return module_of(node)
    for role in ("weight", "bias", *owned):  # an input can be a parameter, too
        if role in owned:
            return owned[role].rpartition(".")[0]
    return module_of(node)


def module_of(node: fx.Node) -> str:
    """The path of the module whose forward made a call; "" of the whole network's."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def _where(node: fx.Node) -> str:
    """File and line of the user's code that made the call."""
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    places = [line.removeprefix('File "').partition('"') for line in lines]
    own = [(file, rest) for file, _, rest in places if _is_users(file)]
    return f"{Path(own[-1][0]).name}, {own[-1][1].removeprefix(', ').partition(',')[0]}" if own else ""


def output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """Names of `count` outputs: "" for a single tensor, the keys of a dict, the places in a tuple."""
    spec: Any = program.call_spec.out_spec
    result = torch.utils._pytree.tree_unflatten(list(range(count)), spec)
    paths = dict(sorted((number, ".".join(path)) for path, number in _leaves(result)))
    return [paths[number] for number in range(count)]


def file_names(names: Sequence[str], inputs: Sequence[str], single: str = "logits") -> list[str]:
    """What outputs of a module (`output_names`) are called where a file names them apart from its inputs.

    >>> file_names(["0", "1.depth"], ["image"]), file_names([""], ["image"]), file_names(["x", "y"], ["x"])
    (['output_0', 'output_1.depth'], ['logits'], ['output_x', 'y'])
    """
    if len(names) == 1:
        return [single]
    taken, found = set(inputs), []
    for name in names:
        found.append(f"output_{name}" if name[:1].isdigit() or name in taken else name)
        taken.add(found[-1])
    return found


def _leaves(result: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The numbers in what a module returns, each with the keys and places on the way to it.

    Not `tree_leaves_with_path`, which refuses classes that a library registers without names, as diffusers does.
    """
    if isinstance(result, int):
        yield path, result
        return
    if isinstance(result, Mapping):
        items: Iterable[tuple[Any, Any]] = result.items()
    elif is_dataclass(result):
        items = ((each.name, getattr(result, each.name)) for each in fields(result))
    else:
        items = enumerate(result) if isinstance(result, (tuple, list)) else ()
    for key, value in items:
        yield from _leaves(value, (*path, str(key)))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's exporters: warnings, loggers, and the graph that they print to stderr before they raise."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    # The others have torch's level. Each change of a level visits every logger of the process.
    loggers = [logger for name in names if (logger := logging.getLogger(name)).level or name == "torch"]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
