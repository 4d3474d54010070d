"""Decode attention that reads once what sequences begin with in common, against plain attention of each."""

import pytest
import torch
from cascades import LARGE, SMALL, check, make_cascade, make_prefixes
from extension_kernels import with_caches
from kernel_checks import KERNEL_SHAPES, SHAPES, on, on_devices, paged_caches, rand

from nanovllm.extensions.prefixes.kernels.shared_prefix import (
    cascade_attention,
    cascade_attention_torch,
    queries_per_item,
)
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.utils.context import Context


@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("block_size", [16, 48])
def test_the_twin_reads_common_tokens_from_one_table(heads, kv_heads, head_dim, block_size):
    shape = heads, kv_heads, head_dim
    check(cascade_attention_torch, SMALL, *shape, block_size, 32, "cpu", torch.float32, padding=2)


@on_devices
@with_caches
@pytest.mark.parametrize("heads, kv_heads, head_dim", KERNEL_SHAPES)
def test_common_tokens_are_read_from_one_table(device, dtype, cache_dtype, heads, kv_heads, head_dim):
    groups, options = on(device, LARGE, SMALL), (heads, kv_heads, head_dim, 16, on(device, 256, 64))
    check(cascade_attention, groups, *options, device, dtype, cache_dtype=cache_dtype)


@on_devices
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("groups", [[(2, 33, 0)], [(1, 0, 0)], SMALL], ids=["one", "none", "some"])
def test_every_block_size_and_number_of_splits(device, block_size, groups):
    """Few sequences: their own tokens are split, and the first split adds what the group has computed."""
    check(cascade_attention, groups, 4, 2, 64, block_size, 32, device, torch.float32, padding=1)


@pytest.mark.parametrize("is_planned", [True, False])
def test_steps_without_a_plan_are_left_to_the_back_end_behind(is_planned):
    class Behind(AttentionBackend):
        def decode(self, q, k_cache, v_cache, variant, step):
            return None

    shared, lengths = make_prefixes([(2, 32, 0)], [3, 5], 32, queries_per_item(2), [0, 1])
    k_cache, v_cache, tables, _ = paged_caches(lengths, 16, 2, 8, "cpu", torch.float32)
    layer = Attention(4, 8, 1.0, 2)
    backend = make_cascade(behind=Behind()).for_layer(layer)
    step = Context(context_lens=torch.tensor(lengths), block_tables=tables)
    step.attention_plan = shared if is_planned else None
    out = backend.decode(rand(2, 4, 8), k_cache, v_cache, layer.variant, step)
    assert (out is not None) is is_planned
