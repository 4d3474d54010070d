"""What observers are told, on every rank, and what they can do with it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_ranks import forked_ranks  # noqa: F401

from nanovllm import LLM, SamplingParams
from nanovllm.assembly import assemble
from nanovllm.engine.interfaces import Observer
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401


class Notebook(Observer):
    """Writes down, beside the checkpoint, what its rank is told."""

    def __init__(self, config):
        self.config = config

    def note(self, text: str) -> None:
        with open(f"{self.config.model}/events.{self.rank}", "a") as file:
            file.write(text + "\n")

    def starting(self, rank, make_runner):
        self.rank = rank
        hf_config = replace(self.config.hf_config, num_hidden_layers=1)
        other = make_runner(replace(self.config, hf_config=hf_config), device=torch.device("cpu"))
        other.build()
        self.note(f"starting, {len(other.model.model.layers)} layer")

    def before_warmup(self, model):
        self.note("before_warmup")

    def before_first_decode(self):
        self.note("before_first_decode")

    def stop(self):
        self.note("stop")


def assemble_watched(config):
    return replace(assemble(config), observers=(Notebook(config),))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(LLM, "assembly", staticmethod(assemble_watched))
    return str(make_checkpoint(tmp_path))


def events(folder: str, rank: int = 0) -> list[str]:
    return Path(folder, f"events.{rank}").read_text().splitlines()


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_tells_its_observers_of_the_start_and_of_the_first_decode_step(folder, size):
    with LLM(folder, **EXACT, tensor_parallel_size=size) as llm:
        expected = ["starting, 1 layer", "before_warmup"]
        for num_tokens, num_prompts in ((1, 1), (3, 1), (3, 2)):  # the first is all prefill
            llm.generate([[1, 2, 3]] * num_prompts, SamplingParams(0, num_tokens, True), use_tqdm=False)
            expected += ["before_first_decode"] * (num_tokens > 1 and len(expected) == 2)
            assert events(folder) == expected
    assert events(folder) == [*expected, "stop"]
    assert all(events(folder, rank) == expected for rank in range(1, size))  # whose processes just end


def test_a_start_that_fails_stops_the_observers(folder, monkeypatch):
    def failing_load(*_):
        raise MemoryError("there is none left")

    monkeypatch.setattr("nanovllm.engine.model_runner.load_model", failing_load)
    with pytest.raises(MemoryError, match="there is none left"):
        LLM(folder, **EXACT)
    assert events(folder) == ["starting, 1 layer", "stop"]
