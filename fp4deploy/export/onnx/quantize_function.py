"""What `TRT_FP4DynamicQuantize` means, in standard ONNX operators.

The operator is TensorRT's: x and a scalar global scale s in, E2M1 codes and E4M3 scales of 16-element blocks along
`axis` out. A file that also carries this function is understood by checkers, shape inference and the reference
evaluator; TensorRT-RTX ignores it (the plan has the same size with and without it, kernel by kernel). The arithmetic
is that of `formats.quantize_nvfp4` with amax fp32(s * 2688), in FP32 and in the same order.
"""

from __future__ import annotations

import onnx
import onnx.parser

TRT_DOMAIN = "trt"
QUANTIZE_OP = "TRT_FP4DynamicQuantize"
DEQUANTIZE_OPS = ("DequantizeLinear", "TRT_FP8DequantizeLinear", "TRT_MXFP8DequantizeLinear")
SELECTING = ("Slice", "Split", "Gather", "MaxPool")  # TensorRT-RTX quantises behind them what is decoded in front
STATIC_QUANTIZE_OPS = ("QuantizeLinear", "TRT_FP8QuantizeLinear")

_FUNCTION = """
<opset_import: ["" : 23], domain: "trt">
TRT_FP4DynamicQuantize <axis, block_size, scale_type> (x, global_scale) => (codes, scales) {
  axis_given = Constant <value_int: int = @axis> ()
  block_length = Constant <value_int: int = @block_size> ()
  nought = Constant <value = int64 {0}> ()
  first = Constant <value = int64[1] {0}> ()
  single = Constant <value = int64[1] {1}> ()
  flat = Constant <value = int64[1] {-1}> ()
  shape = Shape (x)
  rank = Size (shape)
  rank_end = Reshape (rank, flat)
  block_dim = Reshape (block_length, flat)
  axis_from_end = Add (axis_given, rank)
  axis_is_negative = Less (axis_given, nought)
  axis_counted = Where (axis_is_negative, axis_from_end, axis_given)
  axis_start = Reshape (axis_counted, flat)
  axis_end = Add (axis_start, single)
  outer = Slice (shape, first, axis_start)
  extent = Slice (shape, axis_start, axis_end)
  inner = Slice (shape, axis_end, rank_end)
  count = Div (extent, block_dim)
  blocked_shape = Concat <axis = 0> (outer, count, block_dim, inner)
  scales_shape = Concat <axis = 0> (outer, count, inner)

  zero = Constant <value = float {0.0}> ()
  one = Constant <value = float {1.0}> ()
  six = Constant <value = float {6.0}> ()
  minus_six = Constant <value = float {-6.0}> ()
  sixth = Constant <value = float {0.16666667163372039794921875}> ()
  largest_scale = Constant <value = float {448.0}> ()
  range = Constant <value = float {2688.0}> ()
  largest_float = Constant <value = float {340282346638528859811704183484516925440.0}> ()

  x_wide = Cast <to = 1> (x)
  blocks = Reshape (x_wide, blocked_shape)
  magnitude = Abs (blocks)
  block_amax = ReduceMax <keepdims = 1> (magnitude, axis_end)
  is_nan = IsNaN (block_amax)
  is_inf = IsInf (block_amax)
  broken = Or (is_nan, is_inf)

  amax = Mul (global_scale, range)
  dead = Equal (amax, zero)
  encode_unbounded = Div (range, amax)
  encode_bounded = Min (encode_unbounded, largest_float)
  encode_vanished = Equal (encode_bounded, zero)
  encode = Where (encode_vanished, one, encode_bounded)
  decode = Div (one, encode)
  encode_sixth = Mul (encode, sixth)
  scale_unbounded = Mul (block_amax, encode_sixth)
  scale_bounded = Min (scale_unbounded, largest_scale)
  scale_unused = Or (broken, dead)
  scale_exact = Where (scale_unused, zero, scale_bounded)
  scale_rounded = Cast <to = 17> (scale_exact)
  scale = Cast <to = 1> (scale_rounded)
  step = Mul (scale, decode)
  element_unbounded = Div (one, step)
  element_bounded = Min (element_unbounded, largest_float)
  scale_is_zero = Equal (scale, zero)
  element = Where (scale_is_zero, zero, element_bounded)
  scaled = Mul (blocks, element)
  clipped = Clip (scaled, minus_six, six)
  unsigned_zero = Add (clipped, zero)
  live = Where (broken, zero, unsigned_zero)
  elements = Reshape (live, shape)
  codes = Cast <to = 23> (elements)
  nan = Constant <value = float {nan}> ()
  scale_marked = Where (broken, nan, scale)
  scale_shaped = Reshape (scale_marked, scales_shape)
  scales = Cast <to: int = @scale_type> (scale_shaped)
}
"""


def dynamic_quantize_function() -> onnx.FunctionProto:
    """TRT_FP4DynamicQuantize in standard operators: any rank, any axis whose extent is a multiple of 16."""
    return onnx.parser.parse_function(_FUNCTION)
