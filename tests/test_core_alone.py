"""Without its folder `extensions` the project is an engine, on one rank or two, that says what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_checkpoints import make_checkpoint

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

# The package may be installed from the checkout: then its extensions could be found there.
BLOCK = "import runpy, sys; sys.modules['nanovllm.extensions'] = None; sys.argv = sys.argv[1:]; "


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy") / "checkout"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    shutil.rmtree(folder / "nanovllm/extensions")
    shutil.rmtree(folder / "tests/extensions")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def run(folder: Path, program: str, *args: str) -> subprocess.CompletedProcess:
    environ = os.environ | {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    command = [sys.executable, "-c", BLOCK + program, *args]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_the_tests_of_the_core_pass(alone):
    done = run(alone, "runpy.run_module('pytest', run_name='__main__')", "pytest", "-q", "tests/core")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("size", [1, 2])
def test_the_example_answers(alone, model, size):
    options = f"--model {model} --device cpu --max-tokens 4 --tensor-parallel-size {size}".split()
    done = run(alone, "runpy.run_path(sys.argv[0], run_name='__main__')", "example.py", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Prompt: ") == done.stdout.count("Completion: ") == 2


def test_what_only_extensions_serve_is_a_value_error_that_names_it(alone, model):
    program = """
from nanovllm import LLM, SamplingParams
def refused(function, *args, **options):
    try:
        function(*args, **options)
    except ValueError as error:
        print(error)
with LLM(sys.argv[1], device="cpu") as llm:
    for field in ({"top_p": 0.5}, {"logprobs": 1}, {"stop": "a"}, {"logit_bias": {1: 2.0}}, {"n": 2}):
        refused(llm.generate, [[1, 2]], SamplingParams(**field))
for option in ({"lora": "a"}, {"quantization": "fp8"}, {"kv_cache_dtype": "int8"}, {"load_format": "gguf"}):
    refused(LLM, sys.argv[1], device="cpu", **option)
refused(LLM, "Qwen/Qwen3-0.6B", device="cpu")
"""
    done = run(alone, f"exec({program!r})", "-", str(model))
    names = "top_p logprobs stop logit_bias n lora quantization kv_cache_dtype load_format Qwen3-0.6B".split()
    lines = done.stdout.splitlines()
    assert len(lines) == len(names), done.stdout + done.stderr
    assert all(name in line for name, line in zip(names, lines, strict=True)), lines
