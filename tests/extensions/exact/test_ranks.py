"""Sums over the ranks of a CPU have the same bits for each row, however many rows there are."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from forked_ranks import forked_ranks  # noqa: F401
from torch.distributed import HashStore

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.ranks.gloo_group import GlooGroup, OrderedGroup
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401


def sums(kind: type, parts: torch.Tensor) -> torch.Tensor:
    """The sum of parts [ranks, rows, width], computed by ranks of this kind in threads."""
    store = HashStore()

    def compute(part: torch.Tensor, rank: int) -> torch.Tensor:
        group = kind(rank, len(parts), store)
        group.connect(torch.device("cpu"))
        return group.all_reduce(part.clone())

    with ThreadPoolExecutor(len(parts)) as pool:
        first, *others = pool.map(compute, parts, itertools.count())
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_added_up_as_if_it_were_alone(size, dtype):
    parts = torch.randn(size, 70, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    add_up = partial(sums, OrderedGroup)
    whole = add_up(parts)
    torch.testing.assert_close(whole.float(), parts.float().sum(0), rtol=1e-2, atol=3e-2)
    for rows in (1, 3, 37):
        assert torch.equal(add_up(parts[:, :rows]), whole[:rows])


def test_gloo_itself_adds_in_another_order_where_there_are_more_rows():
    parts = torch.randn(3, 70, 64, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(sums(GlooGroup, parts[:, :3]), sums(GlooGroup, parts)[:3])


def test_an_engine_of_three_ranks_computes_a_sequence_as_if_it_were_alone(tmp_path):
    sizes = dict(hidden_size=96, num_attention_heads=3, num_key_value_heads=3, vocab_size=321)
    model = make_checkpoint(tmp_path, "llama", **sizes)
    prompts = [[i, *range(20 * i)] for i in range(6)]
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, logprobs=5)
    options = {**EXACT, "tensor_parallel_size": 3, "exact": True, "enable_prefix_caching": False}
    with LLM(str(model), num_kvcache_blocks=60, **options) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, result in zip(prompts, together, strict=True):
            [alone] = llm.generate([prompt], params, use_tqdm=False)
            assert (alone["token_ids"], alone["logprobs"]) == (result["token_ids"], result["logprobs"])
