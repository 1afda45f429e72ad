"""What a kernel is compiled as: one description for just-in-time (JIT) and ahead-of-time (AOT) compilation.

    JIT   call.launch names the kernel; `kernel[call.grid](*call.values, **options)`        a GPU, Triton installed
    AOT   `triton.compile(ASTSource(kernel, launch.signature(), ...), target=GPUTarget("cuda", 90, 32))`       no GPU

A kernel in CUDA C++ has one for ahead-of-time compilation: its macros are the constants.

Nothing here imports Triton, so that a description can be created, compared and hashed on any machine. A `Launch`
contains no shapes: those are runtime arguments, and one compiled kernel serves every image size and batch. It contains
what changes the code: the operation, dtype, tile, and of how many scale bytes a row is a multiple.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Value = int | float | bool | str | None


@dataclass(frozen=True)
class Launch:
    """A kernel variant, hashable: the key of a compiled binary.

    kernel: "module:function" in this package, such as "conv:conv2d_kernel"; of a source that was generated,
        "generated:function"; of a CUDA source, "block_scaled_conv.cu:block_scaled_conv".
    arguments: (name, Triton type) of the runtime parameters in order, such as ("images", "*u8") or ("height", "i32").
    constants: (name, value) of the constexpr parameters, and None for a runtime parameter that the variant has not.
    divisible: arguments that are multiples of 16 (pointers: aligned to 16 bytes).
    num_warps, num_stages: warps of a block, stages of the software pipeline.
    fp_fusion: whether a * b + c may become one FMA with one rounding; fused quantisation needs two roundings.
    source: text of the module that the function is in, where that is none of this package.
    shared: bytes of dynamic shared memory of a kernel in CUDA C++; Triton's compiler decides by itself.
    """

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Value], ...]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = False
    source: str = ""
    shared: int = 0

    @property
    def compiler(self) -> str:
        """ "triton" or "nvcc"."""
        return "nvcc" if self.kernel.partition(":")[0].endswith(".cu") else "triton"

    def signature(self) -> dict[str, str]:
        """name -> type as `triton.compiler.ASTSource` wants it."""
        return {**dict(self.arguments), **{name: "constexpr" for name, _ in self.constants}}

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """Parameter positions -> divisibility, as `ASTSource` wants it."""
        names = [name for name, _ in self.arguments]
        return {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}

    def options(self) -> dict[str, Any]:
        """Options of compilation, for `triton.compile` and, as keywords, for a just-in-time launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fp_fusion}


@dataclass(frozen=True)
class Call:
    """One launch: the variant, the values of its runtime arguments (tensors, integers, floats) and the grid."""

    launch: Launch
    values: tuple[Any, ...]
    grid: tuple[int, int, int]
