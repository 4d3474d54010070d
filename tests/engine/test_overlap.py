"""The overlapped loop, in which a step is scheduled before the tokens of the one before it are known.

It is a GPU's way of working; here it runs on whatever device there is and must not change a token.
"""

import random

import pytest
from block_pool import check_pool

from nanovllm import LLM, SamplingParams
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

MODES = {
    "plain": {},
    "preemption": {"num_kvcache_blocks": 14},
    "chunks": {"max_num_batched_tokens": 24},
    "few sequences": {"max_num_seqs": 3},
    "no prefix caching": {"enable_prefix_caching": False},
}


def run(folder: str, overlap: bool, params: SamplingParams | list[SamplingParams], eos=(), **options):
    pick = random.Random(0)
    prompts = [[pick.randrange(256) for _ in range(pick.randint(1, 100))] for _ in range(6)]
    prompts += [prompts[-1], [*prompts[-1][:50], 3, 4]]
    with LLM(folder, **{**EXACT, "num_kvcache_blocks": 120, **options}, seed=1) as llm:
        llm._overlap = overlap
        llm.prompts.eos = frozenset(eos)
        results = [r["token_ids"] for r in llm.generate(prompts, params, use_tqdm=False)]
        check_pool(llm.scheduler.block_manager, [])
        assert not llm.scheduler.block_manager.used_block_ids
        assert sorted(llm.scheduler.free_slots) == list(range(llm.config.max_num_seqs))
        return results, llm.scheduler.num_preemptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=2, num_hidden_layers=1))


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("eos", [(), tuple(range(0, 320, 23))], ids=["to the end", "ending early"])
@pytest.mark.usefixtures("no_forecast")
def test_overlapped_steps_give_the_tokens_of_the_plain_loop(folder, options, eos):
    params = [SamplingParams(0.0, 40 - 3 * i, not eos) for i in range(8)]
    expected, _ = run(folder, False, params, eos, **options)
    results, preemptions = run(folder, True, params, eos, **options)
    assert results == expected
    if "num_kvcache_blocks" in options and not eos:
        assert preemptions > 0


def test_overlapped_sampling_draws_the_tokens_of_the_plain_loop(folder):
    params = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True)
    assert run(folder, True, params)[0] == run(folder, False, params)[0]


def test_a_sequence_that_decodes_into_a_full_block_leaves_it_for_others_to_find(folder):
    """Closing the block waits for its last token, which is known one step late."""
    with LLM(folder, **EXACT) as llm:
        llm._overlap = True
        params = SamplingParams(0.0, 60, True)
        [first] = llm.generate([[7] * 20], params, use_tqdm=False)
        seen = []
        allocate = llm.scheduler.block_manager.allocate
        llm.scheduler.block_manager.allocate = lambda seq, hits: (
            allocate(seq, hits),
            seen.append(seq.num_cached_tokens),
        )
        follow_up = [7] * 20 + first["token_ids"][:50]
        [second] = llm.generate([follow_up], SamplingParams(0.0, 10, True), use_tqdm=False)
        assert seen == [69]  # of 70 tokens
        assert llm.stats()["num_copied_tokens"] == 5, "the rest in full blocks"
        assert second["token_ids"] == first["token_ids"][50:]
