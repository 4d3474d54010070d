"""The core's tests against a class of yours, and a race with the one it replaces."""

import contextlib
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from nanovllm.extensions.lab import races

TESTS = Path(__file__).parents[3] / "tests"


class Part(NamedTuple):
    """A class of the core that can be replaced, the core's tests about it, and what a race measures."""

    place: str  # "package.module:Name"
    tests: tuple[str, ...]
    race: Callable[[], Any]


PARTS = {
    "sequence": Part(
        "nanovllm.engine.sequence:Sequence", ("sequence", "block_manager", "scheduler"), races.schedule
    ),
    "block_manager": Part(
        "nanovllm.engine.block_manager:BlockManager", ("block_manager", "scheduler"), races.schedule
    ),
    "scheduler": Part("nanovllm.engine.scheduler:Scheduler", ("scheduler",), races.schedule),
    "attention": Part("nanovllm.layers.attention:AttentionBackend", ("layers", "model"), races.generate),
    "sampler": Part("nanovllm.layers.sampler:Sampler", ("engine",), races.generate),
    "model": Part("nanovllm.models.qwen3:Qwen3ForCausalLM", ("model",), races.generate),
}


class Findings:
    """A plugin of pytest that keeps what passed and what failed, in words."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        statement = report.location[2].removeprefix("test_").replace("_", " ")
        if report.failed:
            self.failed[statement] = str(getattr(report.longrepr, "reprcrash", report.longrepr)).strip()
        elif report.when == "call" and report.passed:
            self.passed.append(statement)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed[f"{report.nodeid} can be imported"] = str(report.longrepr).strip()


def load_module(path: str) -> ModuleType:
    """The module in this file. Raises ValueError if there is none."""
    spec = util.spec_from_file_location(Path(path).stem, path)
    if spec is None or not Path(path).is_file():
        raise ValueError(f"{path} is no file of Python code")
    module = sys.modules[spec.name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replace(old: type, new: type) -> None:
    """Every module that knows one class by its name knows the other from now on."""
    for module in [module for name, module in sys.modules.items() if name.startswith("nanovllm")]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def check(part: str, path: str, has_race: bool = True, out: Callable[[str], Any] = print) -> int:
    """Returns how many statements about the part do not hold. Raises ValueError for what cannot be
    checked."""
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
    if not (TESTS / "core").is_dir():
        raise ValueError(
            f"the core's tests are its specification, and there are none in {TESTS}: run this in a checkout"
        )
    place, tests, race = PARTS[part]
    module_name, name = place.split(":")
    old = getattr(import_module(module_name), name)
    new = getattr(load_module(path), name, None)
    if not isinstance(new, type):
        raise ValueError(f"{path} must have a class {name}")
    replace(old, new)
    findings = run_tests(tests)
    for statement, reason in findings.failed.items():
        out(f"does not hold: {statement}\n    {reason.splitlines()[0]}")
    out(f"{len(findings.passed)} statements hold, {len(findings.failed)} do not.")
    if has_race and not findings.failed:
        out(f"{race.__doc__.strip()} {compare(race, old, new)}")
    return len(findings.failed)


def run_tests(names: tuple[str, ...]) -> Findings:
    import pytest

    findings = Findings()
    os.environ.pop("PYTEST_ADDOPTS", None)  # which may have several processes run the tests
    options = ["-q", "-p", "no:cacheprovider", "-k", "not ranks"]  # other processes do not know the class
    files = [str(TESTS / "core" / f"test_{name}.py") for name in names]
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main([*options, "--rootdir", str(TESTS.parent), *files], [findings])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not findings.failed:
        raise ValueError(f"the tests could not be run: {code!r}")
    return findings


def compare(race: Callable[[], Any], old: type, new: type, repetitions: int = 5) -> str:
    """Both run in turn, so that what else the machine does meets both. The first time is not counted."""
    seconds = {old: [], new: []}
    for _ in range(repetitions + 1):
        for racer, other in ((old, new), (new, old)):
            replace(other, racer)
            start = time.perf_counter()
            race()
            seconds[racer].append(time.perf_counter() - start)
    ours, yours = seconds[old][1:], seconds[new][1:]
    ratio = statistics.median(yours) / statistics.median(ours)
    spread = f"medians of {repetitions}; ours varies by {max(ours) / min(ours):.2f} x"
    return f"Yours takes {ratio:.2f} x as long as ours ({spread})."
