"""Functions replaced for one thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from fp4deploy.export.onnx.exporter import short_export
from fp4deploy.graph.fixed_axes import watched
from fp4deploy.graph.replacement import Rewriting, replaced


def added(number: int) -> Callable[[Callable[[], int]], Callable[[], int]]:
    return lambda before: lambda: before() + number


def module() -> Any:
    owner: Any = ModuleType("owner")
    owner.function = lambda: 0
    return owner


def test_a_thread_has_its_own_replacements_in_any_order() -> None:
    owner = module()
    original, together = owner.function, Barrier(2, timeout=60)

    def work(number: int, leaves_first: bool) -> list[int]:
        found = [owner.function()]
        together.wait()
        with replaced(owner, "function", added(number)):
            together.wait()
            with replaced(owner, "function", added(10)):
                found.append(owner.function())
            found.append(owner.function())
            if not leaves_first:
                together.wait()
                found.append(owner.function())
        found.append(owner.function())
        if leaves_first:
            together.wait()
        return found

    with ThreadPoolExecutor(2) as pool:
        first, last = pool.submit(work, 1, True), pool.submit(work, 2, False)
        assert first.result(60) == [0, 11, 1, 0]
        assert last.result(60) == [0, 12, 2, 2, 0]
    assert owner.function is original


def test_an_error_puts_the_function_back() -> None:
    owner = module()
    original = owner.function
    with pytest.raises(ZeroDivisionError), replaced(owner, "function", added(1)):
        raise ZeroDivisionError
    with pytest.raises(TypeError), replaced(owner, "function", lambda: None):  # type: ignore[arg-type, misc]
        pass
    assert owner.function is original


def functions(table: ONNXRegistry) -> set[int]:
    return {id(function) for each in table.functions.values() for function in each}


def test_another_thread_exports_by_torch_as_it_is() -> None:
    before = torch.export.export, vars(ONNXRegistry)["from_torchlib"], _fx_passes.decompose_with_registry
    x = torch.zeros(2, 4)
    with watched() as found, short_export(), ThreadPoolExecutor(1) as pool:
        pool.submit(torch.export.export, nn.Linear(4, 4), (x,)).result(120)
        assert found == [""]
        assert functions(ONNXRegistry.from_torchlib(23)) == functions(ONNXRegistry.from_torchlib(23))
        tables = [pool.submit(ONNXRegistry.from_torchlib, 23).result(120) for _ in range(2)]
        assert functions(tables[0]) != functions(tables[1])  # each made for itself
        torch.export.export(nn.Linear(4, 4), (x,))
        assert found == ["", ""]
    assert before == (torch.export.export, vars(ONNXRegistry)["from_torchlib"], _fx_passes.decompose_with_registry)


def test_the_last_handler_of_a_function_is_called_first_and_none_sees_its_own_calls() -> None:
    doubled = {torch.sin: lambda call, x: 2 * call(x)}
    shifted = {torch.sin: lambda call, x: call(x + 1) + torch.sin(x)}
    x = torch.tensor(0.5)
    with Rewriting(doubled, shifted):
        found = torch.sin(x), torch.cos(x)
    assert found == (2 * (x + 1).sin() + x.sin(), x.cos())
