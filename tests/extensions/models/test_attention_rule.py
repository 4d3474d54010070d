"""Attention with windows, limits of scores, sinks and slopes: references and kernels against plain sums."""

import pytest
import torch
from cascades import LARGE, SMALL, cascade_config, make_cascade
from cascades import check as check_shared
from extension_kernels import INT8, Features
from kernel_checks import (
    HALF,
    assert_passes_in_the_interpreter,
    check_decode,
    check_prefill,
    on,
    on_devices,
    rand,
)

from nanovllm.extensions.models.attention_rule import AttentionRule
from nanovllm.extensions.prefixes.kernels.shared_prefix import (
    can_share,
    cascade_attention,
    cascade_attention_torch,
    queries_per_item,
)
from nanovllm.kernels.decode_attention import paged_decode_attention, paged_decode_attention_torch
from nanovllm.kernels.kv_store import ROWS
from nanovllm.kernels.prefill_attention import varlen_prefill_attention, varlen_prefill_attention_torch
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED
from nanovllm.layers.attention import Attention
from nanovllm.utils.context import Context

RULES = [Features(window=1), Features(window=17), Features(softcap=2.0), Features(has_sinks=True)]
RULES += [Features(window=17, in_chunks=True), Features(window=16, in_chunks=True)]
RULES += [Features(has_slopes=True), Features(window=40, softcap=2.0, has_sinks=True, has_slopes=True)]
with_rules = pytest.mark.parametrize("features", RULES, ids=str)
in_both_caches = pytest.mark.parametrize("cache_dtype", [torch.float32, INT8], ids=["float32", "int8"])
# Around the edges of windows, of tiles and of blocks.
DECODE_LENGTHS = [1, 16, 0, 17, 18, 33, 40, 41, 100, 48, 57]
PREFILL_LENGTHS = [(5, 5), (1, 17), (1, 18), (0, 7), (33, 33), (40, 40), (41, 41), (16, 70), (64, 100)]


@with_rules
@in_both_caches
@pytest.mark.parametrize("lengths", [DECODE_LENGTHS, [70], [3000]], ids=["many", "one", "long"])
def test_the_decode_reference_keeps_to_the_rule(features, cache_dtype, lengths):
    options = "cpu", torch.float32, cache_dtype, features
    check_decode(paged_decode_attention_torch, lengths, 6, 2, 20, 16, *options)


@with_rules
@pytest.mark.parametrize("cache_dtype, block_size", [(None, 0), (torch.float32, 16), (INT8, 48)], ids=str)
def test_the_prefill_reference_keeps_to_the_rule(features, cache_dtype, block_size):
    options = "cpu", torch.float32, block_size, cache_dtype, features
    check_prefill(varlen_prefill_attention_torch, PREFILL_LENGTHS, 6, 2, 20, *options)


@pytest.mark.parametrize("features", [rule for rule in RULES if not rule.window], ids=str)
@in_both_caches
def test_the_reference_reads_common_tokens_by_the_rule(features, cache_dtype):
    options = "cpu", torch.float32, 2, cache_dtype, features
    check_shared(cascade_attention_torch, SMALL, 6, 2, 20, 16, 32, *options)


def test_blocks_before_the_window_may_hold_anything():
    """They may have been given to somebody else."""
    k_cache, v_cache = (torch.full((4, 16, 1, 8), float("nan")) for _ in "kv")
    k_cache[2], v_cache[2] = rand(16, 1, 8), rand(16, 1, 8)
    tables, rule = torch.tensor([[3, 0, 2]] * 2), AttentionRule(1.0, window=10)
    q, length = rand(1, 1, 8), torch.tensor([44])
    one = Context(context_lens=length, block_tables=tables[:1])
    two = Context(context_lens=length.expand(2), block_tables=tables)
    alone = paged_decode_attention_torch(q, k_cache, v_cache, rule, one, ROWS)
    among = paged_decode_attention_torch(q.expand(2, 1, 8), k_cache, v_cache, rule, two, ROWS)
    step = Context(True, torch.tensor([0, 1]), torch.tensor([0, 44]), 1, 44, block_tables=tables[:1])
    prefilled = varlen_prefill_attention_torch(q, k_cache, v_cache, rule, step, ROWS)
    for out in (alone, among[:1], prefilled):
        torch.testing.assert_close(out, alone)
        assert out.isfinite().all()


def test_a_layer_with_a_window_reads_no_prefix_of_others():
    """It would read what is before its window, by a table that may end before it."""
    layer, plain = Attention(2, 8, 1.0, 1), Attention(2, 8, 1.0, 1)
    layer.variant = AttentionRule(1.0, window=3)
    backend = make_cascade(cascade_config(heads=2, kv_heads=1), layer.backend)
    assert backend.for_layer(plain) is backend and backend.for_layer(layer) is layer.backend


def test_flash_attention_gets_the_slopes():
    slopes = torch.rand(4)
    assert AttentionRule(1.0, slopes=slopes).flash_options()["alibi_slopes"] is slopes
    assert AttentionRule(1.0, window=3).flash_options()["alibi_slopes"] is None


def test_work_items_are_computed_by_layers_that_have_room_for_it():
    cpu = torch.device("cpu")
    assert can_share(4, 4, 128, 2, cpu) and can_share(4, 2, 128, 2, cpu)
    assert not can_share(2, 4, 128, 2, cpu), "of 32 queries with 4 heads half would have no row in a tile"
    assert queries_per_item(80) == queries_per_item(64) and can_share(64, 80, 128, 2, cpu)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
def test_the_kernels_keep_to_the_rule_in_tritons_interpreter():
    assert_passes_in_the_interpreter(__file__)


SHAPES = [
    (16, 2, 64),
    (8, 1, 80),
    (4, 2, 96),
    (6, 2, 112),
    (16, 8, 128),
    (4, 4, 192),
    (8, 2, 256),
    (4, 1, 512),
]
KERNEL_SHAPES = [(6, 2, 20)] if INTERPRETED else SHAPES
KINDS = [(torch.float32, torch.float32), (HALF, INT8), (HALF, HALF)][: 2 if INTERPRETED else 3]
with_kinds = pytest.mark.parametrize("dtype, cache_dtype", KINDS)
KERNEL_RULES = RULES[1:] if INTERPRETED else [*RULES[2:], Features(window=128)]
KERNEL_RULES += [] if INTERPRETED else [Features(window=200, in_chunks=True)]


@on_devices
@with_kinds
@pytest.mark.parametrize("heads, kv_heads, head_dim", KERNEL_SHAPES)
@pytest.mark.parametrize("features", KERNEL_RULES, ids=str)
def test_decode_keeps_to_the_rule(device, dtype, cache_dtype, heads, kv_heads, head_dim, features):
    lengths = on(device, [1, 0, 127, 128, 129, 500, 501, 640, 1000, 4000], [1, 0, 17, 40, 58, 130])
    for some in on(device, (lengths, lengths * 60), (lengths, lengths[-1:])):  # split and not
        options = 16, device, dtype, cache_dtype, features
        check_decode(paged_decode_attention, some, heads, kv_heads, head_dim, *options)


@on_devices
@pytest.mark.parametrize("features", RULES[-1:] if INTERPRETED else RULES, ids=str)
@pytest.mark.parametrize("block_size", [48, 256])
def test_decode_keeps_to_the_rule_for_every_block_size(device, features, block_size):
    lengths, options = on(device, [3000, 100], [300, 100]), (device, torch.float32, INT8, features)
    check_decode(paged_decode_attention, lengths, 4, 2, 64, block_size, *options)


@on_devices
@with_kinds
@pytest.mark.parametrize("heads, kv_heads, head_dim", KERNEL_SHAPES)
@pytest.mark.parametrize("features", KERNEL_RULES, ids=str)
def test_prefill_keeps_to_the_rule(device, dtype, cache_dtype, heads, kv_heads, head_dim, features):
    large = [*PREFILL_LENGTHS, (1000, 1000), (200, 1500), (129, 385), (128, 128), (600, 1100)]
    lengths = on(device, large, [(3, 3), (40, 70), (1, 37), (100, 100)])
    for block_size in (16,) if cache_dtype == INT8 else (0, 16):
        options = device, dtype, block_size, cache_dtype, features
        check_prefill(varlen_prefill_attention, lengths, heads, kv_heads, head_dim, *options)


@on_devices
@with_kinds
@pytest.mark.parametrize("heads, kv_heads, head_dim", KERNEL_SHAPES)
@pytest.mark.parametrize("features", [rule for rule in RULES if not rule.window], ids=str)
def test_common_tokens_are_read_by_the_rule(device, dtype, cache_dtype, heads, kv_heads, head_dim, features):
    groups, options = on(device, LARGE, SMALL), (heads, kv_heads, head_dim, 16, on(device, 256, 64))
    check_shared(cascade_attention, groups, *options, device, dtype, 1, cache_dtype, features)
