"""Scripts of the shape of vLLM's examples run here with nothing changed but the name in their imports, and
docs/coming-from-vllm.md says what is the case."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "porting"
OUTPUT = re.compile(r"^Prompt: '.*'\nOutput: ['\"].+['\"]$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    return str(make_checkpoint(folder, "qwen3", seed=1, vocab_size=257, max_position_embeddings=1024))


@pytest.fixture
def run(folder, monkeypatch, capsys) -> Callable[..., str]:
    def run(name: str, *arguments: str) -> str:
        monkeypatch.setenv("MODEL", folder)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_basic(run):
    assert len(OUTPUT.findall(run("basic"))) == 4


@pytest.mark.parametrize("spelling", ["--max-tokens", "--max_tokens"])
def test_generate(run, folder, spelling):
    printed = run("generate", "--model", folder, spelling, "3", "--dtype=float", "--no-enable-prefix-caching")
    assert len(OUTPUT.findall(printed)) == 2
    with pytest.raises(ValueError, match="no-such-model"):
        run("generate")


def test_chat(run, folder):
    printed = run("chat", f"--model={folder}", "--max_model_len=900", "--seed=1", "--dtype=float32")
    outputs = OUTPUT.findall(printed)
    assert len(outputs) == 12
    assert all("[user]Good morning!" in output and "[assistant]'" in output for output in outputs[:11])
    assert r"user> Good morning!\n" in outputs[11]


def test_prefix_caching(run):
    printed = run("prefix_caching")
    assert len(OUTPUT.findall(printed)) == 3
    assert int(re.search(r"^Same texts: True, from the cache: (\d+) tokens$", printed, re.MULTILINE)[1]) > 100
