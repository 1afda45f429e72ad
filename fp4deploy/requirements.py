"""The libraries that fp4deploy uses where they are installed, and what to say where one is missing.

Every message about a missing library comes from here: a reason and the command that adds it. Devices and compilers are
looked at by `fp4deploy.plugins.runtime.availability`, which uses the same form.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from types import ModuleType

from fp4deploy.errors import UnavailableError


@dataclass(frozen=True)
class Fault:
    """Why a library or program cannot be used. state: "missing", or what it fails to do; reason: then the error."""

    state: str = "missing"
    reason: str | None = None

    def __str__(self) -> str:
        """As a predicate: "is missing", "does not load (REASON)"."""
        return f"is {self.state}" if self.reason is None else f"{self.state} ({self.reason})"


@dataclass(frozen=True)
class Library:
    """A library.

    name: how messages and `doctor` name it, and what it is imported as.
    module: what has to import for it to work; bindings can import without the shared library that they bind.
    """

    name: str
    purpose: str
    install: str
    module: str = ""

    def why_missing(self) -> str | None:
        """Reason and command, such as "pycuda is missing: pip install pycuda"; None where it imports."""
        found = self.find()
        return f"{self.name} {found}: {self.install}" if isinstance(found, Fault) else None

    def require(self, user: str, otherwise: str = "") -> ModuleType:
        """Import it.

        Args:
            user: what needs it, the beginning of the message.
            otherwise: what to do where it cannot be installed.

        Raises:
            UnavailableError: it does not import.
        """
        found = self.find()
        if isinstance(found, Fault):
            instead = f", or {otherwise}" if otherwise else ""
            raise UnavailableError(f"{user} needs {self.name}, which {found}. Add it with: {self.install}{instead}")
        return found

    def version(self) -> str | Fault:
        """Its version, or why it cannot be used."""
        found = self.find()
        if isinstance(found, Fault):
            return found
        return str(getattr(found, "__version__", None) or package_version(self.name) or "unknown version")

    def find(self) -> ModuleType | Fault:
        """The library, imported, or why it cannot be used."""
        try:
            working = importlib.import_module(self.module or self.name)
        except Exception as error:  # a shared library that does not load raises what it likes
            absent = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == self.name
            return Fault() if absent else Fault("does not load", " ".join(str(error).split()) or type(error).__name__)
        spec = getattr(working, "__spec__", None)
        if spec is not None and spec.origin is None:  # a folder of that name without a package in it
            return Fault()
        return importlib.import_module(self.name)


def _extra(name: str) -> str:
    """The command for an extra, under the constraints: without them pip may replace a CPU build of torch."""
    return f"pip install -e '.[{name}]' -c constraints.txt (in a clone of fp4deploy)"


LIBRARIES = {
    library.name: library
    for library in (
        Library("torch", "trains; runs checkpoints", "pip install torch"),
        Library("onnx", "writes and checks the ONNX graph", "pip install onnx"),
        Library("onnxruntime", "verifies the export; runs .onnx", "pip install onnxruntime"),
        Library(
            "tensorrt_rtx",
            "builds SM120/121 engines, also without a GPU; runs them on RTX 50",
            "pip install tensorrt-rtx",
        ),
        Library("tensorrt", "builds and runs engines for SM100 and later, on such a GPU", "pip install tensorrt"),
        Library("pycuda", "launches the kernels (needs the CUDA driver)", "pip install pycuda", "pycuda.driver"),
        Library("triton", "compiles the FP4 GEMM and convolution kernels, also without a GPU", "pip install triton"),
        Library("cv2", "reads and writes videos (predict)", "pip install opencv-python-headless"),
    )
}


TENSORBOARD = Library("tensorboard", "shows telemetry", _extra("tensorboard"), "torch.utils.tensorboard")
WANDB = Library("wandb", "shows telemetry", _extra("wandb"))
MLFLOW = Library("mlflow", "shows telemetry", _extra("mlflow"))
ORT_RTX = Library(
    "onnxruntime_ep_nv_tensorrt_rtx",
    "runs canonical .onnx on RTX GPUs, in ONNX Runtime",
    "pip install onnxruntime-ep-nv-tensorrt-rtx",
)
FASTER_COCO_EVAL = Library("faster_coco_eval", "counts COCO's AP sooner", _extra("coco"))
MODELOPT = Library("modelopt", "its quantisers, for to_modelopt", _extra("modelopt"), "modelopt.torch.quantization")
EMULATOR = Library(
    "fp4deploy_emulator",
    "executes the kernels' PTX on a CPU (kernels --emulate)",
    "pip install ./tools/emulator (in a clone of fp4deploy)",
)
NIBABEL = Library("nibabel", "reads and writes NIfTI volumes", _extra("medical"))
NNUNET = Library("nnunetv2", "networks, preprocessing and prediction of nnU-Net", _extra("nnunet"))
RAY = Library("ray", "runs sweeps on a cluster", _extra("distributed"))


ZOO = {  # the extras `zoo` and `transformers`: libraries of networks, imported only where a model spec names one
    library.name: library
    for library in (
        Library("segmentation_models_pytorch", "smp:... models", _extra("zoo")),
        Library("torchvision", "torchvision:... models", _extra("zoo")),
        Library("monai", "monai:... models", _extra("zoo")),
        Library("timm", "timm:... backbones", _extra("zoo")),
        Library("transformers", "hf:... classifiers", _extra("transformers")),
    )
}


def package_version(module: str) -> str | None:
    """Installed version of an importable package, without importing it; None where it is missing."""
    for name in (module, module.replace("_", "-")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def reasons(*found: str | None) -> str | None:
    """All of several reasons in one text; None where there are none."""
    return "; ".join(filter(None, found)) or None
