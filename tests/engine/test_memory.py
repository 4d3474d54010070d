"""What the engine keeps free for its largest step, and how much of the rest becomes KV cache."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from open_checkpoints import open_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.memory import CPU_KV_CACHE_BYTES, largest_batch, most_positions
from nanovllm.engine.model_runner import ModelRunner
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, one_thread  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=257))


@pytest.fixture(autouse=True)
def whole_kv_cache(monkeypatch):
    monkeypatch.setattr("nanovllm.engine.memory.CPU_KV_CACHE_BYTES", CPU_KV_CACHE_BYTES)


@pytest.mark.parametrize(
    "max_num_batched_tokens, max_num_seqs, max_model_len",
    [(500, 8, 300), (500, 8, 500), (500, 1, 300), (7, 30, 300), (16, 16, 2)],
)
def test_the_warm_up_is_the_largest_step_there_can_be(
    folder, max_num_batched_tokens, max_num_seqs, max_model_len
):
    sizes = dict(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    with LLM(folder, **EXACT, **sizes, max_model_len=max_model_len, num_kvcache_blocks=20) as llm:
        processors = llm.parts.logits_processors
        batch = largest_batch(llm.config, max_num_batched_tokens, processors)
    longest = max_model_len - 1  # a longer prompt leaves no room for a token
    assert sum(batch.lens_q) == min(max_num_batched_tokens, max_num_seqs * longest)
    assert len(batch.lens_q) == min(max_num_seqs, max_num_batched_tokens)
    # Masks change logits where they are, and have their room from the start.
    assert max(batch.lens_q) <= longest
    assert [p.name for i, p in enumerate(processors) if not batch.wanted >> i & 1] == ["bitmask"]
    told = [name for name, message in batch.messages.items() if message is not None]
    assert told == ["scores"] * int(max(batch.lens_q) > 1)


def test_blocks_that_no_sequence_needs_serve_the_prefix_cache(folder):
    needed = 32  # of one sequence: 512 tokens in blocks of 16
    with LLM(folder, **EXACT, max_num_seqs=1) as llm:
        assert llm.config.num_kvcache_blocks > 100 * needed
    with LLM(folder, **EXACT, max_num_seqs=3, enable_prefix_caching=False) as llm:
        assert llm.config.num_kvcache_blocks == 3 * needed


def test_the_rank_with_the_least_memory_decides_how_many_blocks_there_are():
    group = SimpleNamespace(gather=lambda _, budget: [budget, budget // 4, budget // 2])
    config = SimpleNamespace(num_kvcache_blocks=-1, gpu_memory_utilization=0.9)
    cache = mock.Mock(num_blocks_in=lambda num_bytes: num_bytes >> 20)
    device = torch.device("cpu")
    runner = SimpleNamespace(config=config, group=group, kv_cache=cache, device=device)
    ModelRunner.allocate_kv_cache(runner, reserved_bytes=0)
    cache.allocate.assert_called_once_with(CPU_KV_CACHE_BYTES // 4 >> 20)


def test_tables_are_as_long_as_a_sequence_can_be_whatever_a_file_claims(tmp_path):
    """2**24 positions would take gigabytes; what the cache has room for takes some kilobytes."""
    folder, prompt, answers = make_checkpoint(tmp_path), [*range(100)] + [7] * 20, []
    for claimed in (512, 2**24):
        edit_json(folder / "config.json", max_position_embeddings=claimed)
        options = dict(max_model_len=None, num_kvcache_blocks=8, max_num_batched_tokens=32)
        with LLM(str(folder), **EXACT, **options) as llm:
            assert llm.config.max_model_len == claimed
            runner = llm.model_runner
            assert len(runner.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache) == 8 * 16 + 1
            assert runner.slots.inputs.block_tables.shape[1] == 8
            answers += llm.generate([prompt], SamplingParams(0, 9, True), use_tqdm=False)
            with pytest.raises(ValueError, match="8 KV cache blocks of 16 tokens are enough for 129"):
                llm.generate([prompt + prompt], use_tqdm=False)
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_no_more_positions_than_all_of_the_memory_holds(folder, monkeypatch):
    config = Config(folder, **EXACT, max_model_len=400).with_checkpoint(open_checkpoint(folder))
    token_bytes = 2 * 2 * 2 * config.hf_config.head_dim * 4  # keys and values, layers, heads, float32
    for room, budget, ranks, expected in [
        (600, 1, 1, 400), (300, 1, 1, 301), (300, 350, 1, 350), (300, 500, 1, 400), (150, 1, 2, 301),
        (150, 1, 4, 301),  # which share heads
    ]:  # fmt: skip
        monkeypatch.setattr("nanovllm.engine.memory.CPU_KV_CACHE_BYTES", room * token_bytes)
        given = replace(config, max_num_batched_tokens=budget, tensor_parallel_size=ranks)
        assert most_positions(given, torch.device("cpu")) == expected


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_cpu_has_memory_for_what_is_written_only(folder):
    before = resident_bytes()
    with LLM(folder, device="cpu", dtype="float32") as llm:
        [pages] = llm.model_runner.kv_cache.pages
        assert pages.nbytes > 0.99 * CPU_KV_CACHE_BYTES
        llm.generate([[1] * 300], SamplingParams(0, 4, True), use_tqdm=False)
        assert pages[:, :, 0].any() and not pages[:, :, -1].any()
        assert resident_bytes() - before < CPU_KV_CACHE_BYTES / 10
