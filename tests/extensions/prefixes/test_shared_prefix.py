"""Decode attention that reads once what sequences begin with in common, against plain attention of each."""

import random

import pytest
import torch
from cascades import make_cascade
from extension_kernels import with_caches
from kernel_checks import (
    KERNEL_SHAPES,
    NAN,
    PLAIN,
    SHAPES,
    attention_tolerance,
    error,
    layout_of,
    on,
    on_devices,
    paged_caches,
    plain_attention,
    rand,
    store_torch,
)

from nanovllm.extensions.prefixes.kernels.shared_prefix import (
    WithPrefix,
    queries_per_item,
    shared_prefix_attention,
    shared_prefix_attention_torch,
)
from nanovllm.extensions.prefixes.plan import MAX_PARTIALS, CascadePlan
from nanovllm.kernels.decode_attention import paged_decode_attention, paged_decode_attention_torch
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.utils.context import Context

# Groups of sequences: how many tokens they have in common, and of the second half of them, how many more.
SMALL, LARGE = [(3, 40, 21), (1, 0, 0), (2, 16, 0), (6, 67, 30)], [(70, 500, 131), (3, 0, 0), (17, 1024, 700)]


def make_prefixes(groups, own_lens, piece, per_task, order):
    """The description of `groups`, with sequence i at place order[i] of the batch, and each one's length."""
    batch = len(order)
    prefix_lens, parts = [0] * batch, [[] for _ in range(batch)]
    members, tasks, lengths, i = [], [], [0] * batch, 0
    for count, common, more in groups:
        everyone = order[i : i + count]
        for some, begin, end in ((everyone, 0, common), (everyone[count // 2 :], common, common + more)):
            for start in range(begin, end, piece):
                for first in range(0, len(some), per_task):
                    chunk = some[first : first + per_task]
                    tasks.append((len(members), len(chunk), start, min(start + piece, end)))
                    for member in chunk:
                        parts[member].append(len(members))
                        members.append(member)
                        prefix_lens[member] = min(start + piece, end)
        for member in everyone:
            lengths[member] = prefix_lens[member] + own_lens.pop()
        i += count
    for own in parts:
        assert len(own) <= MAX_PARTIALS
    tables = [
        prefix_lens, list(map(len, parts)), [own + [2**30] * (MAX_PARTIALS - len(own)) for own in parts],
        [*members, 2**30], [*tasks, (2**30,) * 4], [len(tasks)],
    ]  # fmt: skip
    return CascadePlan(*(torch.tensor(x, dtype=torch.int32) for x in tables)), lengths


def check(
    attend, groups, heads, kv_heads, head_dim, block_size, piece, device, dtype, padding=0, cache_dtype=None,
    features=PLAIN,
):  # fmt: skip
    batch = sum(count for count, _, _ in groups) + padding
    order = random.Random(0).sample(range(batch), batch)
    per_task = queries_per_item(heads // kv_heads)
    own_lens = random.Random(1).choices(range(1, on(device, 300, 30)), k=batch - padding)
    shared, lengths = make_prefixes(groups, own_lens, piece, per_task, order)
    k_cache, v_cache, tables, sequences = paged_caches(
        lengths, block_size, kv_heads, head_dim, device, cache_dtype or dtype
    )
    for first, count, begin, end in shared.work_items[:-1].tolist():
        # Only the first member has what all begin with.
        leader, *others = shared.queries[first : first + count].tolist()
        token = torch.arange(begin, end, device=device)
        for member in others:
            slots = tables[member].long()[token // block_size] * block_size + token % block_size
            for own, common in zip(sequences[member], sequences[leader], strict=True):
                own[begin:end] = common[begin:end]
            nothing = torch.full((len(slots), kv_heads, head_dim), NAN, device=device)
            store_torch(nothing, nothing, k_cache, v_cache, slots)
    q = rand(batch, heads + 2 * kv_heads, head_dim, device=device, dtype=dtype)[:, :heads]
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    shared = CascadePlan(*(x.to(device) for x in shared))
    rule = features.rule(heads, head_dim, device)
    layout = layout_of(cache_dtype or dtype)
    is_reference = attend is paged_decode_attention_torch
    attend_prefix = shared_prefix_attention_torch if is_reference else shared_prefix_attention
    prefix = attend_prefix(q, k_cache, v_cache, tables, rule, shared, layout)
    variant = WithPrefix(rule, shared, *prefix)
    out = attend(q, k_cache, v_cache, tables, context_lens, variant, layout)
    assert out.shape == q.shape and out.dtype == dtype
    for i, (k, v) in enumerate(sequences):
        expected = plain_attention(q[i : i + 1], k, v, rule) if lengths[i] else torch.zeros_like(q[:1])
        assert error(out[i : i + 1], expected) < attention_tolerance(dtype, cache_dtype), i


@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("block_size", [16, 48])
def test_the_twin_reads_common_tokens_from_one_table(heads, kv_heads, head_dim, block_size):
    shape = heads, kv_heads, head_dim
    check(paged_decode_attention_torch, SMALL, *shape, block_size, 32, "cpu", torch.float32, padding=2)


@on_devices
@with_caches
@pytest.mark.parametrize("heads, kv_heads, head_dim", KERNEL_SHAPES)
def test_common_tokens_are_read_from_one_table(device, dtype, cache_dtype, heads, kv_heads, head_dim):
    groups, options = on(device, LARGE, SMALL), (heads, kv_heads, head_dim, 16, on(device, 256, 64))
    check(paged_decode_attention, groups, *options, device, dtype, cache_dtype=cache_dtype)


@on_devices
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("groups", [[(2, 33, 0)], [(1, 0, 0)], SMALL], ids=["one", "none", "some"])
def test_every_block_size_and_number_of_splits(device, block_size, groups):
    """Few sequences: their own tokens are split, and the first split adds what the group has computed."""
    check(paged_decode_attention, groups, 4, 2, 64, block_size, 32, device, torch.float32, padding=1)


@pytest.mark.parametrize("is_planned", [True, False])
def test_the_back_end_behind_gets_what_each_sequence_has_of_its_own(is_planned):
    """A step without a plan is left to it altogether."""

    class Behind(AttentionBackend):
        def decode(self, q, k_cache, v_cache, variant, step):
            return variant

    shared, _ = make_prefixes([(2, 32, 0)], [3, 5], 32, queries_per_item(2), [0, 1])
    k_cache, v_cache, tables, _ = paged_caches([35, 37], 16, 2, 8, "cpu", torch.float32)
    layer = Attention(4, 8, 1.0, 2)
    backend = make_cascade(behind=Behind()).for_layer(layer)
    step = Context(block_tables=tables, attention_plan=shared if is_planned else None)
    variant = backend.decode(rand(2, 4, 8), k_cache, v_cache, layer.variant, step)
    assert isinstance(variant, WithPrefix) is is_planned
    assert variant.first_token(torch.tensor([35, 37])).tolist() == ([32, 32] if is_planned else [0, 0])
