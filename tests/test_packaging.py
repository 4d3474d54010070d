"""What is built of a checkout: a source distribution that can be tested, and a wheel with its command."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = "nanovllm tests docs .ci".split()
FILES = "pyproject.toml MANIFEST.in README.md LICENSE .gitignore example.py bench.py".split()
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of this checkout in which both were built."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    (copy / "tests/__pycache__").mkdir()
    (copy / "tests/__pycache__/left.pyc").touch()
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return copy


def test_a_source_distribution_has_what_a_checkout_has(checkout):
    [path] = checkout.glob("dist/*.tar.gz")
    with tarfile.open(path) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    files = [file for name in FOLDERS for file in (checkout / name).rglob("*") if file.is_file()]
    expected = {file.relative_to(checkout).as_posix() for file in files} | set(FILES)
    assert expected - found == {"tests/__pycache__/left.pyc"}


def test_a_wheel_has_the_command_and_the_annotations(checkout):
    [path] = checkout.glob("dist/*.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / "nanovllm").rglob("*.py")}
    modules |= {f"nanovllm/extensions/timeline/page.{ending}" for ending in ("html", "js")}
    assert {*modules, "nanovllm/py.typed"} == {name for name in names if name.startswith("nanovllm/")}
    [info] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    with zipfile.ZipFile(path) as archive:
        made = PathDistribution(zipfile.Path(archive, f"{info}/"))
        [command] = made.entry_points
        assert (command.group, command.name) == ("console_scripts", "nanovllm")
        assert command.load().__module__ == "nanovllm.extensions.server.__main__"
        extras = made.metadata.get_all("Provides-Extra")
        [everything] = [name for name in made.requires if name.endswith('extra == "all"')]
    named = re.search(r"\[(.*)\]", everything)[1].split(",")
    assert sorted(named) == sorted({*extras} - {"all", "flash", "test"})
