"""Calls replaced one by one: the program computes the same, and torch traces again only where it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fp4deploy.graph import rewrites
from fp4deploy.graph.rewrites import changes_in_place, decomposed, inline_regions, made_functional


class Changes(nn.Module):
    """A chain of calls in place on one tensor, which is returned as it was named first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.conv(x))
        before = y * 2
        z = y.relu_()
        y += before
        y.mul_(z.mean())
        return y, before


class ViewRead(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        part = y[:, :1]
        y.relu_()
        return part + 1


class ViewChanged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, :1].relu_()
        return y


class SplitRead(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        a, b = y.split([1, 2], 1)
        y.relu_()
        return a + b


class DropoutRead(nn.Module):
    """In evaluation the dropout's result is its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = nn.functional.dropout(y, training=False)
        y.relu_()
        return z + 1


class InputChanged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_() + 1


class OtherType(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x > 0).to(torch.int64)
        y.mul_(torch.tensor([2], dtype=torch.int32))
        y.half().add_(x)
        return y * x


def exported(model: nn.Module) -> tuple[torch.export.ExportedProgram, torch.Tensor]:
    torch.manual_seed(0)
    shapes: Any = ({0: torch.export.Dim("batch", min=1)},)
    return torch.export.export(model.eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes=shapes), torch.randn(3, 3, 8, 8)


def test_calls_in_place_become_functional() -> None:
    program, x = exported(Changes())
    expected = program.module()(x.clone())
    assert sum(map(changes_in_place, program.graph.nodes)) == 3
    assert made_functional(program)
    assert not any(map(changes_in_place, program.graph.nodes))
    assert all(map(torch.equal, program.module()(x), expected))


@pytest.mark.parametrize("model", [ViewRead, ViewChanged, SplitRead, DropoutRead, InputChanged])
def test_what_is_read_through_another_name_is_left_to_torch(model: type[nn.Module]) -> None:
    program, x = exported(model())
    before = str(program.graph)
    assert not made_functional(program)
    assert str(program.graph) == before
    assert program.run_decompositions({}).module()(x.clone()) is not None


def test_a_result_of_another_type_is_left_to_torch() -> None:
    program, x = exported(OtherType())
    expected = program.module()(x.clone())
    made_functional(program)
    assert torch.equal(program.module()(x.clone()), expected)


def test_calls_are_decomposed_alone_as_in_a_whole_trace(monkeypatch: pytest.MonkeyPatch) -> None:

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm in self.norms:
                x = norm(x)
            return torch.nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)

    traced = []
    one = rewrites._traced
    monkeypatch.setattr(rewrites, "_traced", lambda node, table: traced.append(node.target) or one(node, table))
    program, x = exported(Twice())
    expected = program.module()(x)
    table = torch.export.default_decompositions()
    whole = program.run_decompositions(table)
    composite = (torch.ops.aten.batch_norm.default, torch.ops.aten.adaptive_avg_pool2d.default)
    assert decomposed(program, lambda node: node.target in (*composite, torch.ops.aten.flatten.using_ints), table)
    calls, others = ([str(n.target) for n in each.graph.nodes if n.op == "call_function"] for each in (program, whole))
    assert sorted(set(calls)) == sorted(set(others))
    assert len(traced) == 3  # three norms of one shape are traced once
    torch.testing.assert_close(program.module()(x), expected)


def test_a_call_that_reads_nothing_is_decomposed_with_the_sizes_of_the_program() -> None:
    class Identity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.eye(x.shape[-1], device=x.device)

    program, x = exported(Identity())
    eye = torch.ops.aten.eye.default
    assert decomposed(program, lambda node: node.target is eye, torch.export.default_decompositions())
    assert eye not in {node.target for node in program.graph.nodes}
    values = (node.meta.get("val") for node in program.graph.nodes)
    assert len({each.fake_mode for each in values if isinstance(each, FakeTensor)}) == 1
    assert torch.equal(program.run_decompositions({}).module()(x), x)


def test_a_size_that_the_program_has_is_not_read_again() -> None:
    """As in a whole trace: the files of a network do not depend on which of them its calls went through."""

    class Tokens(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x).reshape(x.shape[0], 3, -1).sin().flatten(1).flatten(0)

    program, x = exported(Tokens())
    flatten, table = torch.ops.aten.flatten.using_ints, torch.export.default_decompositions()
    whole, expected = program.run_decompositions(table), program.module()(x)
    assert decomposed(program, lambda node: node.target is flatten, table)
    reads, others = (
        [node.args for node in each.graph.nodes if node.target is torch.ops.aten.sym_size.int]
        for each in (program, whole)
    )
    assert str(reads) == str(others) == "[(x, 0)]"
    assert torch.equal(program.module()(x), expected)


def test_a_decomposition_that_is_not_accepted_changes_nothing() -> None:
    program, _ = exported(nn.Sequential(nn.BatchNorm2d(3)))
    before = str(program.graph)
    table = torch.export.default_decompositions()
    assert not decomposed(program, lambda node: node.op == "call_function", table, lambda _: False)
    assert str(program.graph) == before


class Regions(nn.Module):
    """Without autocast, with gradients, and a region that has an autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            y = self.one(x)
            z = y.relu()
        with torch.enable_grad():
            y = self.two(y)
        with torch.autocast("cpu", torch.bfloat16):
            return self.three(y).float(), z


def test_regions_become_part_of_the_graph_and_keep_their_modules() -> None:
    torch.manual_seed(0)
    model, x = Regions().eval(), torch.randn(3, 4)
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=False)
        inline_regions(program)
        program.validate()
        assert all(map(torch.equal, program.module()(x), model(x)))
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    modules = [list(node.meta["nn_module_stack"].values())[-1][0] for node in calls if "linear" in str(node.target)]
    assert modules == ["one", "two"]
    regions = [str(node.target) for node in calls if isinstance(node.target, torch._ops.HigherOrderOperator)]
    assert regions == ["wrap_with_autocast"]  # one that changes what is computed
