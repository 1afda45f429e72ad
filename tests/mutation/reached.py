"""Which tests execute which line: python -m tests.mutation.reached FOLDER [TESTS ...]

Coverage's tracer with a context for each test and each fixture: a test has the lines of the fixtures that it asks for,
whichever test they were made for. What a child process executes is not seen, nor what a cache of a test file kept. Writes
`NAME.coverage`, and `NAME.json` with the fixtures and seconds of the tests that passed, for each folder of tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.copies import ROOT

LASTING = "not (emulate or variants or nightly or gpu)"  # as `make test`, without a GPU
LEFT_OUT = ("benchmarks", "docs", "mutation", "native", "packaging", "plugins", "selftest")  # of the GPU, or no code's


class Reached:
    """What `record` wrote: seconds of each test that passed, and the tests of a line."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, dict[str, float]()
        self._asking = defaultdict[str, list[str]](list)  # context -> tests
        for path in sorted(folder.glob("*.json")):
            for test, each in json.loads(path.read_text(encoding="utf-8")).items():
                self.seconds[test] = each["seconds"]
                for context in (test, *each["fixtures"]):
                    self._asking[context].append(test)

    def tests(self, file: str, lines: Iterable[int]) -> set[str]:
        """The tests that execute one of some lines of a file."""
        contexts = self._contexts(file)
        return {test for line in lines for context in contexts.get(line, ()) for test in self._asking[context]}

    @cache  # noqa: B019
    def _contexts(self, file: str) -> dict[int, set[str]]:
        from coverage import CoverageData

        found = defaultdict[int, set[str]](set)
        for path in sorted(self.folder.glob("*.coverage")):
            data = CoverageData(str(path))
            data.read()
            for measured in data.measured_files():
                if measured.endswith(f"/{file}"):
                    for line, contexts in data.contexts_by_lineno(measured).items():
                        found[line].update(contexts)
        return found


class _Recorder:
    """A plugin of pytest that switches contexts of coverage."""

    def __init__(self, data: Path) -> None:
        from coverage import Coverage

        packages = [str(ROOT / "fp4deploy"), str(ROOT / "cli")]
        self.coverage = Coverage(str(data), source=packages, config_file=False, messages=False)
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed = set[str]()
        self._context = ""

    def _switch(self, context: str) -> str:
        before, self._context = self._context, context
        self.coverage.switch_context(context)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        definitions = item._fixtureinfo.name2fixturedefs if hasattr(item, "_fixtureinfo") else {}
        start = time.monotonic()
        self._switch(item.nodeid)
        done = yield
        self._switch("")
        self.tests[item.nodeid] = {
            "fixtures": sorted(f"{each[-1].baseid} {name}" for name, each in definitions.items()),
            "seconds": round(time.monotonic() - start, 2),
        }
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        before = self._switch(f"{fixturedef.baseid} {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)


def record(stem: Path, tests: Iterable[str]) -> None:
    """Run tests, and write what they execute."""
    recorder = _Recorder(stem.with_suffix(".coverage"))
    recorder.coverage.start()
    try:
        pytest.main(["-q", "-p", "no:cacheprovider", "-m", LASTING, *tests], plugins=[recorder])
    finally:
        recorder.coverage.stop()
        recorder.coverage.save()
    passed = {test: each for test, each in recorder.tests.items() if test not in recorder.failed}
    stem.with_suffix(".json").write_text(json.dumps(passed, indent=0), encoding="utf-8")


def main() -> int:
    """The command: one process for each folder of tests, whose caches are its own."""
    folder, names = Path(sys.argv[1]).absolute(), sys.argv[2:]
    if len(names) > 1 and names[0] == "--only":
        record(folder / names[1], names[2:])
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    tests = ROOT / "tests"
    folders = {
        each.name: [f"tests/{each.name}"] for each in sorted(tests.iterdir()) if (each / "__init__.py").is_file()
    }
    folders["top"] = [f"tests/{each.name}" for each in sorted(tests.glob("test_*.py"))]
    for name in names or [name for name in folders if name not in LEFT_OUT]:
        command = [sys.executable, "-m", "tests.mutation.reached", str(folder), "--only", name, *folders[name]]
        subprocess.run(command, cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
