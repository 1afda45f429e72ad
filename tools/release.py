"""Build what a release publishes, in dist/, and try it; nothing is uploaded.

    python tools/release.py                of a release: version, changelog, tag and log of the GPU tests fit together
    python tools/release.py --rehearse     the same of any commit; what does not fit yet is listed, and does not stop it

| file | what |
|---|---|
| `fp4deploy-*.tar.gz`, `*.whl` | sdists of the package and of the emulator, and the wheels built from them |
| `fp4deploy-*.cdx.json` | SBOM (CycloneDX): what the wheel was installed with under constraints.txt, and licences |
| `SHA256SUMS` | digests of all of these |

Everything is built twice, from two copies of the commit and never from the working tree, and has to be equal byte for
byte: times are the commit's (SOURCE_DATE_EPOCH), files of the archives are sorted and belong to nobody. Then the wheel
is installed in an environment of its own and answers `fp4deploy doctor` and `fp4deploy selftest`. Workflows are checked
against the schema of GitHub's that check-jsonschema has.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

from fp4deploy import __version__

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = (".", "tools/emulator")
PASSED = re.compile(r"(?!.*(failed|error)).*\b\d+ passed\b.*")  # the last line of pytest
DATED = re.compile(rf"^## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)$", re.MULTILINE)


def main() -> None:
    """Check, build, compare, install, list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="of any commit")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="new folder (default: dist)")
    options = parser.parse_args()
    problems = [*unfit(), *changed()]
    for problem in problems:
        print(f"{'not yet' if options.rehearse else 'error'}: {problem}", file=sys.stderr)
    if problems and not options.rehearse:
        sys.exit(1)
    if options.out.exists() and any(options.out.iterdir()):
        sys.exit(f"error: {options.out} holds files. Move them, or give another folder: --out DIR")
    workflows = sorted(ROOT.glob(".github/workflows/*.yml"))
    tool("check_jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, workflows))
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        first, second = (build(Path(folder) / name) for name in ("first", "second"))
        different = [path.name for path in first if digest(path) != digest(path.parents[1] / "second" / path.name)]
        if different or len(first) != len(second):
            sys.exit(f"error: built twice, these files differ: {', '.join(different) or 'their number'}")
        tool("twine", "check", "--strict", *map(str, first))
        installed = install(first, Path(folder) / "environment")
        bom = Path(folder) / f"fp4deploy-{__version__}.cdx.json"
        sbom(installed, bom)
        for path in (*first, bom):
            shutil.copy(path, options.out)
    lines = [f"{digest(path)}  {path.name}\n" for path in sorted(options.out.iterdir())]
    (options.out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    print("".join(lines), end="")


def unfit() -> list[str]:
    """What of version, changelog, tag and GPU log does not fit together."""
    found = []
    if not DATED.search((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        found.append(f"CHANGELOG.md has no heading '## {__version__} (YEAR-MONTH-DAY)'")
    if git("tag", "--points-at", "HEAD", "--list", f"v{__version__}") == "":
        found.append(f"the commit has no tag v{__version__}")
    log = ROOT / "benchmarks" / "logs" / f"gpu-tests-{__version__}.log"
    if not log.is_file():
        found.append(f"{log.relative_to(ROOT)} is missing: run `make gpu-log` on a machine with an NVIDIA GPU")
    elif not PASSED.fullmatch("".join(log.read_text(encoding="utf-8").splitlines()[-1:])):
        found.append(f"{log.relative_to(ROOT)} does not end with tests that all passed")
    return found


def changed() -> list[str]:
    """Files that are not those of the commit."""
    files = git("status", "--short", "--untracked-files=no").splitlines()
    return [f"{len(files)} files differ from the commit that is built (first: {files[0].split()[-1]})"] if files else []


def build(folder: Path) -> list[Path]:
    """sdists and wheels of both distributions, from a copy of the commit."""
    source, out = folder.with_name(f"{folder.name}.source"), folder
    out.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(source, filter="data")
    epoch = git("log", "-1", "--format=%ct")
    for project in PROJECTS:
        tool("build", "--no-isolation", "--sdist", "--outdir", str(out), str(source / project), epoch=epoch)
    for sdist in out.glob("*.tar.gz"):
        normalize(sdist, int(epoch))
        with tarfile.open(sdist) as tar:
            tar.extractall(source / "unpacked", filter="data")
        unpacked = source / "unpacked" / sdist.name.removesuffix(".tar.gz")
        tool("build", "--no-isolation", "--wheel", "--outdir", str(out), str(unpacked), epoch=epoch)
    return sorted(out.iterdir())


def normalize(sdist: Path, epoch: int) -> None:
    """An archive of the same files, sorted, of this time and of no user: setuptools writes those of the machine."""
    with tarfile.open(sdist) as source:
        members = sorted(source.getmembers(), key=lambda member: member.name)
        data = {member.name: source.extractfile(member) for member in members if member.isfile()}
        content = {name: file.read() for name, file in data.items() if file is not None}
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in members:
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() or member.mode & 0o100 else 0o644, {}
            target.addfile(member, io.BytesIO(content[member.name]) if member.name in content else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as compressed:
        compressed.write(raw.getvalue())


def install(files: list[Path], folder: Path) -> Path:
    """The wheel in an environment of its own, which answers; the environment's Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    (wheel,) = [path for path in files if path.suffix == ".whl" and path.name.startswith("fp4deploy-")]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # torch first: with the wheel's requirements at once pip would look for a newer build than the constraint's.
    for call in ([*pip, "torch"], [*pip, str(wheel)]):
        subprocess.run(call, check=True, env=own)
    for arguments in (["-m", "pip", "check"], ["-m", "fp4deploy.cli", "--version"]):
        subprocess.run([str(python), *arguments], cwd=folder, env=own, check=True)
    for command in ("doctor", "selftest"):
        subprocess.run([str(folder / "bin" / "fp4deploy"), command], cwd=folder, env=own, check=True)
    return python


def sbom(python: Path, target: Path) -> None:
    """CycloneDX's own program, of what is installed in an environment."""
    program = Path(sys.executable).with_name("cyclonedx-py")
    call = [str(program), "environment", "--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml")]
    subprocess.run([*call, "--of", "JSON", "-o", str(target), str(python)], check=True)
    name_version(target)


def name_version(target: Path) -> None:
    """Say in an SBOM which version it is of: pyproject.toml, where CycloneDX looks, has it from the package."""
    bom = json.loads(target.read_text(encoding="utf-8"))
    own = bom["metadata"]["component"]
    own |= {"version": __version__, "purl": f"pkg:pypi/{own['name']}@{__version__}"}
    target.write_text(json.dumps(bom, indent=2) + "\n", encoding="utf-8")


def tool(name: str, *arguments: str, epoch: str = "") -> None:
    """A Python program of the `release` extra."""
    own = {**os.environ, **({"SOURCE_DATE_EPOCH": epoch} if epoch else {})}
    done = subprocess.run([sys.executable, "-m", name, *arguments], env=own, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {name} {arguments[0]}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def digest(path: Path) -> str:
    """SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*arguments: str) -> str:
    """What git says, without a newline at the end."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
