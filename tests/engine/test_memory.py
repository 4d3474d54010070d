"""What the engine keeps free for its largest step, and how much of the rest becomes KV cache."""

import os
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.memory import CPU_KV_CACHE_BYTES, largest_batch
from nanovllm.sampling_params import Needs
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=257))


@pytest.mark.parametrize(
    "max_num_batched_tokens, max_num_seqs, max_model_len",
    [(500, 8, 300), (500, 8, 500), (500, 1, 300), (7, 30, 300), (16, 16, 2)],
)
def test_the_warm_up_is_the_largest_step_there_can_be(
    folder, max_num_batched_tokens, max_num_seqs, max_model_len
):
    sizes = dict(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    with LLM(folder, **EXACT, **sizes, max_model_len=max_model_len, num_kvcache_blocks=20) as llm:
        batch = largest_batch(llm.config, max_num_batched_tokens)
    longest = max_model_len - 1  # a longer prompt leaves no room for a token
    assert sum(batch.lens_q) == min(max_num_batched_tokens, max_num_seqs * longest)
    assert len(batch.lens_q) == min(max_num_seqs, max_num_batched_tokens)
    # Masks change logits where they are, and have their room from the start.
    assert max(batch.lens_q) <= longest and batch.needs == ~Needs.MASKS
    assert (batch.scoring is not None) == (max(batch.lens_q) > 1)


def test_blocks_that_no_sequence_needs_serve_the_prefix_cache(folder):
    needed = 32  # of one sequence: 512 tokens in blocks of 16
    with LLM(folder, **EXACT, max_num_seqs=1) as llm:
        assert llm.config.num_kvcache_blocks > 100 * needed
    with LLM(folder, **EXACT, max_num_seqs=3, enable_prefix_caching=False) as llm:
        assert llm.config.num_kvcache_blocks == 3 * needed


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
