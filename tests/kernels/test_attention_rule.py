"""Attention with windows, soft limits of scores and sinks: twins and kernels against plain arithmetic."""

import pytest
import torch
from test_kernels import INT8, Features, check_decode, check_prefill, rand
from test_shared_prefix import SMALL
from test_shared_prefix import check as check_shared

from nanovllm.kernels.attention_rule import AttentionRule
from nanovllm.kernels.decode_attention import paged_decode_attention_torch
from nanovllm.kernels.prefill_attention import varlen_prefill_attention_torch

RULES = [Features(window=1), Features(window=17), Features(softcap=2.0), Features(has_sinks=True)]
RULES += [Features(window=40, softcap=2.0, has_sinks=True)]
with_rules = pytest.mark.parametrize("features", RULES, ids=str)
in_both_caches = pytest.mark.parametrize("cache_dtype", [torch.float32, INT8], ids=["float32", "int8"])
# Around the edges of windows, of tiles and of blocks.
DECODE_LENGTHS = [1, 16, 0, 17, 18, 33, 40, 41, 100, 48, 57]
PREFILL_LENGTHS = [(5, 5), (1, 17), (1, 18), (0, 7), (33, 33), (40, 40), (41, 41), (16, 70), (64, 100)]


@with_rules
@in_both_caches
@pytest.mark.parametrize("lengths", [DECODE_LENGTHS, [70]], ids=["many", "one"])
def test_the_decode_twin_keeps_to_the_rule(features, cache_dtype, lengths):
    options = "cpu", torch.float32, cache_dtype, features
    check_decode(paged_decode_attention_torch, lengths, 6, 2, 20, 16, *options)


@with_rules
@pytest.mark.parametrize("cache_dtype, block_size", [(None, 0), (torch.float32, 16), (INT8, 48)], ids=str)
def test_the_prefill_twin_keeps_to_the_rule(features, cache_dtype, block_size):
    options = "cpu", torch.float32, block_size, cache_dtype, features
    check_prefill(varlen_prefill_attention_torch, PREFILL_LENGTHS, 6, 2, 20, *options)


@pytest.mark.parametrize("features", [rule for rule in RULES if not rule.window], ids=str)
@in_both_caches
def test_the_twin_reads_common_tokens_by_the_rule(features, cache_dtype):
    options = "cpu", torch.float32, 2, cache_dtype, features
    check_shared(paged_decode_attention_torch, SMALL, 6, 2, 20, 16, 32, *options)


def test_blocks_before_the_window_may_hold_anything():
    """They may have been given to somebody else."""
    k_cache, v_cache = (torch.full((4, 16, 1, 8), float("nan")) for _ in "kv")
    k_cache[2], v_cache[2] = rand(16, 1, 8), rand(16, 1, 8)
    tables, rule = torch.tensor([[3, 0, 2]] * 2), AttentionRule(1.0, window=10)
    q, length = rand(1, 1, 8), torch.tensor([44])
    alone = paged_decode_attention_torch(q, k_cache, v_cache, tables[:1], length, rule)
    among = paged_decode_attention_torch(q.expand(2, 1, 8), k_cache, v_cache, tables, length.expand(2), rule)
    starts = torch.tensor([0, 1]), torch.tensor([0, 44])
    prefilled = varlen_prefill_attention_torch(q, k_cache, v_cache, *starts, 1, 44, rule, tables[:1])
    for out in (alone, among[:1], prefilled):
        torch.testing.assert_close(out, alone)
        assert out.isfinite().all()
