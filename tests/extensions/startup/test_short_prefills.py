"""Prefills of few tokens are recorded, and tell what those tell that run eagerly."""

import random

import pytest
import recorded_graphs

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.startup import short_prefills
from nanovllm.extensions.startup.short_prefills import ShortPrefills
from tiny_checkpoints import EXACT, make_checkpoint

pick = random.Random(1)
# Lengths of prompts: alone and together, up to the sizes that there are and beyond.
BATCHES = [[pick.randrange(1, 40) for _ in range(count)] for count in (1, 3, 1, 14, 16)]
BATCHES += [[64], [65], [200, 25], [300, 300, 300, 124], [300, 300, 300, 150], [64]]
BATCHES += [[25] * 14, [190, 190], [20]]  # a graph replayed with fewer sequences, and with fewer tokens
first = iter(range(256))  # no two begin alike
PROMPTS = [[[next(first), *pick.choices(range(256), k=n - 1)] for n in lengths] for lengths in BATCHES]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NEW = {(tokens, False) for tokens in (64, 128, 256, 384, 1024)}
CACHED = {(64, True)}  # the second time nearly all of each prompt is in the cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=2))


def tokens_of(llm, batches: list) -> list[list[int]]:
    return [each["token_ids"] for batch in batches for each in llm.generate(batch, PARAMS, use_tqdm=False)]


def assert_all_is_as_expected(llm, expected: list[list[int]], batches: list = PROMPTS[:4]) -> None:
    found = tokens_of(llm, batches)
    assert found == expected[: len(found)]


@pytest.fixture(scope="module")
def expected(folder) -> list[list[int]]:
    with LLM(folder, **OPTIONS) as llm:
        return tokens_of(llm, PROMPTS)


OPTIONS = EXACT | dict(num_kvcache_blocks=600, max_num_seqs=520)


@pytest.fixture
def llm(folder, monkeypatch):
    with LLM(folder, **OPTIONS) as made:
        recorded_graphs.install(made, monkeypatch)
        yield made


def watch(llm, monkeypatch, num_bytes: float) -> ShortPrefills:
    """On a card that has so many bytes."""
    monkeypatch.setattr(short_prefills, "bytes_left", lambda _, share: int(share * num_bytes))
    observer = ShortPrefills()
    observer.started(llm)
    return observer


@pytest.fixture
def prefills(llm, monkeypatch) -> ShortPrefills:
    return watch(llm, monkeypatch, 20e9)


def test_recorded_prefills_tell_the_same(llm, prefills, expected):
    for kinds in (NEW, NEW | CACHED):
        assert_all_is_as_expected(llm, expected, PROMPTS)
        assert {*prefills.recorded} == kinds
    num_graphs = len(llm.model_runner.graphs.graphs)
    assert_all_is_as_expected(llm, expected, PROMPTS)
    assert len(llm.model_runner.graphs.graphs) == num_graphs
    prefills.stop()
    assert not prefills.recorded


def test_graphs_need_no_kernels_of_their_own(prefills):
    """Triton compiles another one for an address that is no multiple of 16 bytes."""
    bounds = prefills.bounds_q, prefills.bounds_k
    for tensor in (*prefills.tokens, prefills.slots, *bounds, prefills.tables):
        assert tensor.data_ptr() % 16 == 0


def test_hooks_are_called_in_all_prefills(llm, prefills, expected):
    seen = []
    hook = llm.model_runner.model.model.norm.register_forward_pre_hook(lambda *_: seen.append(1))
    assert_all_is_as_expected(llm, expected)
    assert not prefills.recorded
    hook.remove()
    assert_all_is_as_expected(llm, expected)
    assert prefills.recorded


def test_where_recording_fails_prefills_run_eagerly(llm, prefills, expected, monkeypatch):
    capture = llm.model_runner.graphs.capture

    def fail(step, in_two):
        if "ShortPrefills" in getattr(step, "__qualname__", ""):
            raise RuntimeError("no memory")
        return capture(step, in_two)

    monkeypatch.setattr(llm.model_runner.graphs, "capture", fail)
    assert_all_is_as_expected(llm, expected)
    assert prefills.is_off and not prefills.recorded


def test_where_little_memory_is_left_prefills_run_eagerly(llm, expected, monkeypatch):
    prefills = watch(llm, monkeypatch, 10e9)
    assert_all_is_as_expected(llm, expected)
    assert not prefills.recorded


@pytest.mark.gpu
def test_on_a_gpu_they_tell_the_same(folder):
    found = []
    options = dict(dtype="float32", max_num_seqs=520, num_kvcache_blocks=200)
    for is_eager in (True, False):
        with LLM(folder, enforce_eager=is_eager, **options) as llm:
            found += [tokens_of(llm, PROMPTS), tokens_of(llm, PROMPTS)]
            prefills = [each for each in llm.parts.observers if isinstance(each, ShortPrefills)]
            assert {*prefills[0].recorded} == (set() if is_eager else NEW | CACHED)
    assert found[0] == found[1] == found[2] == found[3]
