"""A weight packed once and used for every batch: 4.5 bits an element instead of 16.

    with fp4_quantize(layer.weight, layer.bias) as cache:
        y = cache.forward(x)                            FP16 or BF16 activations, weights decoded in registers (W4A16)
        y = cache.forward(x, input_amax="dynamic")      activations packed as well (W4A4)
        q = cache.forward(x, 3.5, True, out_amax=6.0)   and the output, for the next layer: other.forward(q)

A cache holds tensors and nothing else: no handle, no workspace, no state that a call changes. Threads, streams and CUDA
graphs may share one. As with any tensor, leave it only when streams other than the one it was made on are done.

A linear weight [N, K] is packed along K, a convolution's [O, I, KH, KW] as [O, KH, KW, I] along I: the contraction
axis. The bias is kept in float32, in which kernels add it.

**Frozen.** `fp4_quantize(..., frozen=True)` or `cache.freeze()` declares that the packed weight is never written again.
A small-M GEMM (GEMV) may then read it while the kernel before it is still running (programmatic dependent launch,
`plugins.runtime.pdl`). Without that declaration every kernel starts in stream order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, Nvfp4Tensor, swizzle_scales
from fp4deploy.plugins.gemm import scaled_mm
from fp4deploy.plugins.gemm.dispatch import check_bias, check_packed, matmul
from fp4deploy.plugins.gemm.operands import InputAmax, output_dtype, pack, refuse_gradients, scalar
from fp4deploy.plugins.gemm.reference import Output
from fp4deploy.plugins.gemm.scaled_mm import packed_matmul
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.plugins.runtime import pdl

HELD = ("weight", "bias", "swizzled")


@dataclass(frozen=True, eq=False, repr=False, init=False)
class FP4WeightCache:
    """A packed weight and its bias, and the layers that use it; of a weight, or made by `fp4_quantize` or `load`.

    weight: [N, K] or [O, KH, KW, I], packed; a plain tensor [N, K] or [O, I, KH, KW] is packed first, to nearest.
    bias: [N] or None, kept in float32.
    swizzled: a linear weight's scales in the 128x4 layout, on GPUs where torch's `scaled_mm` wants them; else None.
    frozen: codes and scales of the weight are never written again; see `freeze`.

    Raises:
        InputError: parts that do not fit; anything after the cache was released.

    >>> with FP4WeightCache(torch.ones(32, 64)) as cache:
    ...     cache.weight.codes.shape
    torch.Size([32, 32])
    >>> cache.released
    True
    """

    weight: Nvfp4Tensor
    bias: torch.Tensor | None
    swizzled: torch.Tensor | None
    frozen: bool

    def __init__(
        self, weight: Nvfp4Tensor | torch.Tensor, bias: torch.Tensor | None = None, *, frozen: bool = False
    ) -> None:
        packed, held = (weight, bias) if isinstance(weight, Nvfp4Tensor) else _packed(weight, bias, None)
        for name, value in (("weight", packed), ("bias", held), ("frozen", frozen)):
            object.__setattr__(self, name, value)
        _check(self.weight, self.bias)
        if self.frozen:
            pdl.freeze(self.weight)
        device = self.weight.codes.device
        native = len(self.weight.shape) == 2 and scaled_mm.why_unavailable(device) is None
        object.__setattr__(self, "swizzled", swizzle_scales(self.weight.scales) if native else None)

    def __getattr__(self, name: str) -> object:
        if name in HELD:  # reached only where the attribute is gone
            raise InputError("This FP4WeightCache was released. Make another with fp4_quantize or FP4WeightCache.load.")
        raise AttributeError(f"'FP4WeightCache' has no attribute '{name}'")

    def __enter__(self) -> FP4WeightCache:
        _ = self.weight
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        if self.released:
            return "FP4WeightCache(released)"
        weight = self.weight
        return f"FP4WeightCache({tuple(weight.shape)}, {self.nbytes} bytes, {weight.codes.device})"

    def freeze(self) -> FP4WeightCache:
        """Declare that codes and scales are never written again, and return this cache.

        Small-M GEMMs then start as secondary kernels (programmatic dependent launch): they read the weight before the
        kernel before them in the stream has finished. Writing into a frozen weight gives wrong results.
        The bias and the activations may change at any time.
        """
        pdl.freeze(self.weight)
        object.__setattr__(self, "frozen", True)
        return self

    def release(self) -> None:
        """Let go of the tensors, as leaving the context does; more than once does no harm."""
        self.__dict__.clear()

    @property
    def released(self) -> bool:
        """Whether the tensors are gone."""
        return "weight" not in self.__dict__

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        weight = self.weight
        parts = (weight.codes, weight.scales, weight.amax, self.bias, self.swizzled)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.weight.codes.device

    def forward(
        self,
        x: torch.Tensor | Nvfp4Tensor,
        input_amax: InputAmax = None,
        relu: bool = False,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
        out_amax: float | torch.Tensor | None = None,
    ) -> Output:
        """relu(x W^T + bias) of a linear weight.

        Args:
            x: [..., K], any strides; float16 or bfloat16 for a weight-only GEMM, any float dtype to be packed; or
                packed already.
            input_amax: None multiplies `x` as it is; "dynamic", a number or a float32 [] packs it (`operands`).
            dtype: of the output, float16 or bfloat16; by default that of `x`, float16 where it has none of these.
            backend: of a GEMM of two packed operands, see `scaled_matmul`.
            out_amax: pack the output with this amax, for the next layer (of two packed operands).

        Returns:
            [..., N], or packed in blocks along N.

        Raises:
            InputError: shapes, dtypes, devices or options do not fit; `x` requires a gradient; the weight is a filter.
        """
        weight, bias, swizzled = self.weight, self.bias, self.swizzled
        refuse_gradients(x)
        if len(weight.shape) != 2:
            raise InputError(f"This is a filter {tuple(weight.shape)} [O, KH, KW, I]: call fp4_conv2d(x, cache).")
        if not isinstance(x, (torch.Tensor, Nvfp4Tensor)) or tuple(x.shape[-1:]) != tuple(weight.shape[1:]):
            shape = tuple(x.shape) if isinstance(x, (torch.Tensor, Nvfp4Tensor)) else type(x).__name__
            raise InputError(
                f"x is {shape} and the weight [N, K] is {tuple(weight.shape)}: x must end with {weight.shape[1]}."
            )
        if isinstance(x, torch.Tensor) and input_amax is None:
            return self._weight_only(x, weight, bias, relu, dtype, backend, out_amax)
        if isinstance(x, Nvfp4Tensor) and input_amax is not None:
            raise InputError("x is packed already, with its own amax: leave input_amax out.")
        a = x if isinstance(x, Nvfp4Tensor) else pack(x, input_amax)
        amax = None if out_amax is None else scalar(out_amax, weight.codes.device, "out_amax")
        return packed_matmul(a, weight, bias, relu, output_dtype(x, dtype), amax, backend, swizzled)

    @staticmethod
    def _weight_only(
        x: torch.Tensor,
        weight: Nvfp4Tensor,
        bias: torch.Tensor | None,
        relu: bool,
        dtype: torch.dtype | None,
        backend: str | None,
        out_amax: float | torch.Tensor | None,
    ) -> Output:
        if dtype not in (None, x.dtype):
            raise InputError(f"A weight-only GEMM of {x.dtype} gives {x.dtype}, not {dtype}; with input_amax it can.")
        if backend is not None and scaled_mm.chosen(backend) == "scaled_mm":
            raise InputError(
                "scaled_mm multiplies two packed operands: give input_amax ('dynamic' or a number) as well."
            )
        if out_amax is not None:
            raise InputError(
                "A weight-only GEMM writes no packed output: give input_amax ('dynamic' or a number) with out_amax."
            )
        return matmul(x, weight, bias, relu)

    def to(self, device: torch.device | str) -> FP4WeightCache:
        """This cache, or a copy on another device, frozen if this one is."""
        weight, bias = self.weight, self.bias
        codes = weight.codes.to(device)
        if codes.device == weight.codes.device:
            return self
        moved = Nvfp4Tensor(codes, weight.scales.to(device), weight.amax.to(device), weight.shape, weight.e4m3_max)
        return FP4WeightCache(moved, None if bias is None else bias.to(device), frozen=self.frozen)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight as the kernels decode it, [N, K], or [O, I, KH, KW] (channels_last)."""
        weight = self.weight.dequantize(dtype)
        return weight if weight.ndim == 2 else weight.permute(0, 3, 1, 2)

    def swizzled_scales(self) -> torch.Tensor:
        """Block scales in the 128x4 layout, flat; those of a filter as the matrix [O, KH KW blocks]."""
        swizzled, scales = self.swizzled, self.weight.scales
        return swizzle_scales(scales.flatten(1)) if swizzled is None else swizzled

    def save(self, path: Path | str) -> None:
        """Write a safetensors file, whole or not at all; see `weight_file`.

        Raises:
            InputError: it cannot be written; an older file survives.
        """
        from fp4deploy.plugins.gemm.weight_file import write_weight

        write_weight(Path(path), self.weight, self.bias)

    @classmethod
    def load(cls, path: Path | str, device: torch.device | str = "cpu") -> FP4WeightCache:
        """Read and check what `save` wrote.

        Raises:
            InputError: the file is missing, truncated, damaged or of another kind.
        """
        from fp4deploy.plugins.gemm.weight_file import read_weight

        return cls(*read_weight(Path(path))).to(device)


def fp4_quantize(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    four_over_six: FourOverSix | None = None,
    *,
    frozen: bool = False,
) -> FP4WeightCache:
    """Pack the weight of a linear layer or convolution, on a GPU by a kernel; parameters may be given (no gradient).

    Args:
        weight: [N, K] or [O, I, KH, KW], any float dtype, any strides.
        bias: [N] on the same device.
        four_over_six: let each block choose between mapping its amax to 6 and to 4: a smaller error, no other cost.
        frozen: the packed weight is never written again (`FP4WeightCache.freeze`); for inference with few rows.

    Raises:
        InputError: other shapes or dtypes.

    >>> fp4_quantize(torch.ones(32, 64))
    FP4WeightCache((32, 64), 1156 bytes, cpu)
    """
    return FP4WeightCache(*_packed(weight, bias, four_over_six), frozen=frozen)


def _packed(
    weight: torch.Tensor, bias: torch.Tensor | None, four_over_six: FourOverSix | None
) -> tuple[Nvfp4Tensor, torch.Tensor | None]:
    if not isinstance(weight, torch.Tensor) or weight.ndim not in (2, 4) or not weight.is_floating_point():
        kind = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise InputError(f"The weight is {kind}; a floating-point [N, K] or [O, I, KH, KW] can be packed.")
    check_bias(bias, weight.shape[0])
    packed = quantize_nvfp4(weight.detach(), four_over_six=four_over_six, axis=1)
    held = None if bias is None else bias.detach().to(torch.float32).contiguous()
    return packed, held


def _check(weight: Nvfp4Tensor, bias: torch.Tensor | None) -> None:
    if not isinstance(weight, Nvfp4Tensor) or len(weight.shape) not in (2, 4) or weight.amax.numel() != 1:
        raise InputError("A cache holds a packed [N, K] or [O, KH, KW, I] with one amax: make it with fp4_quantize.")
    check_packed(weight, "A weight")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.codes.device):
        raise InputError(
            f"The bias is {tuple(bias.shape)} on {bias.device}; ({weight.shape[0]},) on {weight.codes.device} fits."
        )
