"""Compiling kernels for any architecture, on a machine with or without a GPU, into files that need no compiler.

    compiled = compile_launch(launch, "sm_120")         # from a folder or the cache, else by Triton or nvcc

`triton.compile` takes a target that need not be present: the kernel's source, the types of its arguments, its constants
and the compute capability go in; PTX and a cubin come out. Here the result is checked against what
`fp4deploy.plugins.aot.load` can launch and stored by `fp4deploy.plugins.aot.store`. Triton's own cache cannot be used
instead: its keys contain a hash of the Triton installation, so that a machine without Triton cannot find its entries.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import threading
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError
from fp4deploy.plugins.aot import store
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.aot.store import Compiled
from fp4deploy.plugins.runtime import cubin, nvcc
from fp4deploy.plugins.runtime.cache import keep_entry, one_process
from fp4deploy.plugins.runtime.nvcc import KernelError, LaunchError
from fp4deploy.requirements import LIBRARIES
from fp4deploy.system.children import owned_folder

INSTALL_TRITON = LIBRARIES["triton"].install
# Triton's types -> letters of a launch signature (`runtime.launch`); pointers, "*...", are P.
LETTERS = {"i8": "b", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
# Variables that change what Triton compiles: with any of them set, nothing is read from the cache or written to it.
ALTERING = (
    "DISABLE_PTXAS_OPT",
    "PTXAS_OPTIONS",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_ENABLE_ASAN",
)
# The first Triton that compiles for an architecture at all, and the first that compiles an FP4 GEMM for it; the others
# compile with every supported Triton. For sm_107 Triton 3.7 aborts its process on some kernels; ptxas of 3.8 refuses.
SINCE = {"sm_107": (3, 9)}
FP4_SINCE = {"sm_121": (3, 8)}
BROUGHT_BY = {(3, 8): "2.14", (3, 9): "2.15"}  # the torch that requires it

_compiling = threading.Lock()  # Triton's settings and stdout are global to the process


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """The kernel for an architecture: from a folder or the cache, else compiled now, on any machine with its compiler.

    Args:
        launch: the variant.
        arch: such as "sm_120" or "sm120".

    Raises:
        InputError: no such kernel or architecture, or a description that does not fit the kernel.
        KernelError: it is not compiled yet and its compiler is missing, or the compiler refuses it.
    """
    arch = store.supported(arch).triton_name
    shipped, own = store.shipped_folders(), store.own_folder()
    version = compiler_version(launch)
    if version is None:
        return compiled_before(launch, arch)
    make, altering = (_by_nvcc, nvcc.ALTERING) if launch.compiler == "nvcc" else (_compile, ALTERING)
    if any(os.environ.get(name) for name in altering):
        return make(launch, arch)
    found = store.find(launch, arch, shipped) or store.find(launch, arch, [own], version)
    if found is None:
        entry = own / store.file_name(launch, arch, version)
        with one_process(entry):
            found = store.find(launch, arch, [own], version)
            if found is None:
                found = make(launch, arch)
                keep_entry(entry, store.pack(found))
    return found


def compiled_before(launch: Launch, arch: str) -> Compiled:
    """The kernel for an architecture from a folder or the cache, where nothing compiles it.

    Raises:
        LaunchError: it is in none; another variant may be.
    """
    found = store.find(launch, arch, [*store.shipped_folders(), store.own_folder()])
    if found is None:
        raise LaunchError(_not_compiled(launch, arch))
    return found


@lru_cache
def triton_version() -> str | None:
    """Version of the Triton that imports here; None where there is none."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def compiler_version(launch: Launch) -> str | None:
    """Version of what compiles a kernel; None where it is missing."""
    if launch.compiler == "triton":
        return triton_version()
    found = nvcc.find_nvcc()
    return nvcc.release(found) if found else None


def versions() -> str:
    """Of this package and of what compiles and runs networks with it."""
    import torch

    import fp4deploy

    return f"{fp4deploy.__version__} {torch.__version__} {triton_version()} {torch.backends.cudnn.version()}"


def too_old(arch: str, native: bool) -> str:
    """Why the Triton that imports here does not compile a kernel for an architecture; empty where it does.

    native: the kernel is an FP4 GEMM.
    """
    since, version = SINCE.get(arch) or (FP4_SINCE.get(arch) if native else None), triton_version()
    if since is None or version is None or tuple(map(int, version.split(".")[:2])) >= since:
        return ""
    lacks = "does not compile for it" if arch in SINCE else "has no FP4 GEMM for it"
    first = ".".join(map(str, since))
    return (
        f"Triton {version} {lacks}, {first} and later {'do' if arch in SINCE else 'have'}. Install a torch that "
        f"requires one ({BROUGHT_BY[since]} or later), or compile with Triton in a folder of its own: pip install "
        f"--no-deps --target triton39 triton==3.9.0, then PYTHONPATH=triton39 {command(arch)}, then set "
        "FP4DEPLOY_KERNEL_PATH=DIR."
    )


def command(arch: str) -> str:
    """The command that compiles every kernel for an architecture."""
    return f"fp4deploy kernels --arch {Architecture.parse(arch)} --out DIR"


def signature(parameters: tuple[str, ...]) -> str:
    """Parameter types of Triton as a launch signature (`runtime.launch`), with the two scratch pointers at the end.

    Raises:
        InputError: a type that no argument can have here.
    """
    letters = ["P" if name.startswith("*") else LETTERS.get(name, "") for name in parameters]
    if "" in letters:
        raise InputError(f"No launch takes arguments of type {parameters[letters.index('')]}. Valid: {list(LETTERS)}.")
    return "".join(letters) + "PP"


def _compile(launch: Launch, arch: str) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _kernel(launch)
    names = {name: position for position, name in enumerate(kernel.arg_names)}
    constants = dict(launch.constants)
    runtime = [name for name in names if name not in constants]
    if runtime != [name for name, _ in launch.arguments] or not set(launch.divisible) <= set(runtime):
        raise InputError(f"{launch.kernel} takes {', '.join(names)}, and the launch describes it as {launch}.")
    if why := too_old(arch, bool(dict(launch.constants).get("NATIVE"))):
        raise KernelError(f"{launch.kernel} does not compile for {arch}: {why}")
    attributes = {(names[name],): [["tt.divisibility", 16]] for name in launch.divisible}
    values = {(names[name],): value for name, value in launch.constants}
    source = ASTSource(kernel, launch.signature(), values, attributes)
    target = GPUTarget("cuda", Architecture.parse(arch).number, 32)
    # Triton writes into its own cache too, which is not needed here and may not be writable: give it a temporary one.
    # Where ptxas fails, Triton prints the whole PTX on stdout; the exception has the message that matters.
    with _compiling, owned_folder() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = triton.compile(source, target=target, options=launch.options())
        except Exception as error:
            raise KernelError(f"{launch.kernel} does not compile for {arch}: {str(error)[:4000]}\n{launch}") from error
    return _checked(launch, arch, code)


def _by_nvcc(launch: Launch, arch: str) -> Compiled:
    """What nvcc makes of a kernel in CUDA C++, the same machine code as at its first launch."""
    source, _, name = launch.kernel.partition(":")
    macros = cast(nvcc.Macros, dict(launch.constants))
    target = Architecture.parse(arch).nvcc_target
    code, ptx = nvcc.compile_cubin(source, target, macros), nvcc.compile_ptx(source, target, macros)
    registers, spills = cubin.resources(code)
    return Compiled(
        cubin=code,
        ptx=ptx,
        name=name,
        parameters=tuple(kind for _, kind in launch.arguments),
        divisible=(),
        shared=launch.shared,
        num_warps=launch.num_warps,
        registers=registers,
        spills=spills,
        instructions=cubin.matrix_instructions(ptx),
        arch=arch,
        triton=str(compiler_version(launch)),
        sources=store.source_digest(launch),
        launch=store.description(launch),
    )


def _kernel(launch: Launch) -> Any:
    """The jitted function of a launch."""
    from triton import JITFunction

    module = imported(launch.source) if launch.source else importlib.import_module(store.module_name(launch))
    name = launch.kernel.partition(":")[2]
    kernel = getattr(module, name, None)
    if kernel is None:
        raise InputError(f"There is no kernel {name} in {module.__name__}.")
    if not isinstance(kernel, JITFunction):
        raise KernelError(f"{launch.kernel} was imported for Triton's interpreter; compile without TRITON_INTERPRET=1.")
    return kernel


def imported(source: str) -> ModuleType:
    """A generated module; Triton reads the text of its functions from its file while the file is there."""
    with owned_folder() as folder:
        path = folder / "generated.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("generated", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _checked(launch: Launch, arch: str, code: Any) -> Compiled:
    """Triton's result, if `aot.load` can launch it."""
    about = code.metadata._asdict()
    ptx = code.asm["ptx"]
    name, parameters = cubin.entry_point(ptx)
    needs = {
        "scratch memory": about.get("global_scratch_size") or about.get("profile_scratch_size"),
        "thread-block clusters": about.get("num_ctas", 1) != 1,
        "a cooperative or dependent launch": about.get("launch_cooperative_grid") or about.get("launch_pdl"),
        "tensor descriptors": about.get("tensordesc_meta"),
        "other parameters than it describes": len(parameters) != len(launch.arguments) + 2,
        f"another architecture ({cubin.target(ptx)})": Architecture.find(cubin.target(ptx)) != Architecture.find(arch),
    }
    wrong = [what for what, needed in needs.items() if needed]
    if wrong:
        raise KernelError(
            f"{launch.kernel} compiled for {arch} needs {' and '.join(wrong)}, which this launcher does not support."
        )
    names = [name for name, _ in launch.arguments]
    registers, spills = cubin.resources(code.asm["cubin"])
    types = tuple(kind for _, kind in launch.arguments)
    signature(types)
    return Compiled(
        cubin=code.asm["cubin"],
        ptx=ptx,
        name=name,
        parameters=types,
        divisible=tuple(names.index(each) for each in launch.divisible),
        shared=about["shared"],
        num_warps=about["num_warps"],
        registers=registers,
        spills=spills,
        instructions=cubin.matrix_instructions(ptx),
        arch=arch,
        triton=str(about.get("triton_version") or triton_version()),
        sources=store.source_digest(launch),
        launch=store.description(launch),
    )


def _not_compiled(launch: Launch, arch: str) -> str:
    folders = [*store.shipped_folders(), store.own_folder()]
    others = [each for each in store.architectures(launch, folders) if each != arch]
    there = f" It is there for {', '.join(others)}; a cubin runs on its own architecture only." if others else ""
    compiler, needs, lacks, install, run = "Triton", "Triton", "is missing", INSTALL_TRITON, command(arch)
    if launch.compiler == "nvcc":
        compiler, needs, lacks = "nvcc", "Triton, nvcc", "is missing or does not compile for it"
        install = nvcc.INSTALL_NVCC
        run += " --layers FILE.fp4"
    return (
        f"{launch.kernel} is not compiled for {arch}, and {compiler} {lacks}. Searched: "
        f"{', '.join(map(str, folders))}.{there} On a machine with {needs} and this version of fp4deploy run: "
        f"{run}; then set FP4DEPLOY_KERNEL_PATH=DIR here. Or: {install}. The variant: {launch}"
    )
