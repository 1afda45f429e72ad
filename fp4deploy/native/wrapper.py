"""Inductor's wrapper as an fx graph whose launches are `inductor.launched`, without compiling or loading a kernel."""

from __future__ import annotations

from typing import Any

from torch._inductor.codegen.common import FileBackedGraphModule
from torch._inductor.codegen.wrapper_fxir import FxConverter, WrapperFxCodegen

from fp4deploy.native.inductor import launched


class _Converter(FxConverter):
    def _generate_triton_call(self, line: Any) -> None:
        arguments = [each if hasattr(each, "op") else int(each) for each in self._lookup_args(tuple(line.call_args))]
        self.gm.graph.call_function(launched, (line.kernel_name, *arguments))

    def _generate_kernel_definition(self, line: object) -> None:
        pass


def wrapper_class(kernels: dict[str, str]) -> type[WrapperFxCodegen]:
    """A class of wrappers that adds what defines each kernel to `kernels`."""

    class Wrapper(WrapperFxCodegen):
        def _generate(self, is_inference: bool) -> tuple[FileBackedGraphModule, None]:
            self.run_wrapper_ir_passes(is_inference)
            made: list[Any] = [line for line in self.lines if hasattr(line, "kernel_body")]
            kernels.update({line.kernel_name: line.kernel_body for line in made})
            inputs, outputs = self.get_fx_graph_inputs(), self.get_graph_outputs()
            lines = [line for line in self.lines if not isinstance(line, str)]  # comments
            module = _Converter(lines, "", inputs, outputs, self.subgms, False).generate()
            return FileBackedGraphModule(module, module.forward), None

    return Wrapper
