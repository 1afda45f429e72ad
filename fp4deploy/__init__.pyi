from .bench.runtimes.open import open_runtime
from .errors import Fp4DeployError, GateError, InputError, UnavailableError
from .export.engine.build import build_engine
from .export.onnx.graph import export_graph
from .export.to_onnx import export_checkpoint, export_onnx
from .export.to_packed import compile, pack
from .export.verify.exported import verify
from .formats.four_over_six import FourOverSix
from .formats.mxfp4 import quantize_mxfp4
from .formats.nvfp4 import quantize_nvfp4
from .models.generation import generate, with_cache
from .plugins.gemm.conv import fp4_conv2d
from .plugins.gemm.grouped import fp4_grouped_linear
from .plugins.gemm.linear import fp4_cached_linear, fp4_linear, fp4_matmul
from .plugins.gemm.weight_cache import FP4WeightCache, fp4_quantize
from .predict.predictor import load
from .ptq.quantize import quantize
from .qat.fusion.fuse import fuse
from .qat.load import load_model
from .qat.plan import layer_plan
from .qat.prepare import calibrate, prepare, restore
from .qat.recipes import RECIPES, QuantSpec, Recipe

__version__: str

__all__ = [
    "RECIPES",
    "FP4WeightCache",
    "FourOverSix",
    "Fp4DeployError",
    "GateError",
    "InputError",
    "QuantSpec",
    "Recipe",
    "UnavailableError",
    "build_engine",
    "calibrate",
    "compile",
    "export_checkpoint",
    "export_graph",
    "export_onnx",
    "fp4_cached_linear",
    "fp4_conv2d",
    "fp4_grouped_linear",
    "fp4_linear",
    "fp4_matmul",
    "fp4_quantize",
    "fuse",
    "generate",
    "layer_plan",
    "load",
    "load_model",
    "open_runtime",
    "pack",
    "prepare",
    "quantize",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "restore",
    "verify",
    "with_cache",
]
