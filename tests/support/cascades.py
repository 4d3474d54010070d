"""Cascade attention without an engine."""

import random
from types import SimpleNamespace
from typing import Any

import torch
from kernel_checks import (
    NAN,
    PLAIN,
    attention_tolerance,
    error,
    layout_of,
    on,
    paged_caches,
    plain_attention,
    rand,
    store_torch,
)

from nanovllm.extensions.prefixes.cascade import CascadeBackend
from nanovllm.extensions.prefixes.kernels.shared_prefix import MAX_PARTIALS, CascadePlan, queries_per_item
from nanovllm.layers.attention import AttentionBackend
from nanovllm.utils.context import Context


def cascade_config(heads: int = 4, kv_heads: int = 2, **options: Any) -> SimpleNamespace:
    """All that a CascadeBackend reads of an engine's options, and more `options`."""
    sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, tokens_in_reach=0, vocab_size=50)
    defaults = dict(attention_backend="auto", enable_prefix_caching=True, tensor_parallel_size=1)
    return SimpleNamespace(
        **defaults | dict(max_num_seqs=4, torch_dtype=torch.float32) | options,
        hf_config=SimpleNamespace(**sizes),
    )


def make_cascade(config: Any = None, behind: AttentionBackend | None = None) -> CascadeBackend:
    """On the CPU."""
    cpu = torch.device("cpu")
    backend = CascadeBackend(behind or AttentionBackend(), config or cascade_config())
    backend.allocate(cpu)
    return backend


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
        [*members, 2**30], [*tasks, (2**30,) * 4], [len(tasks)], [[0, 0]] * batch,
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
    step = Context(context_lens=context_lens, block_tables=tables, attention_plan=shared)
    out = attend(q, k_cache, v_cache, rule, step, layout)
    assert out.shape == q.shape and out.dtype == dtype
    for i, (k, v) in enumerate(sequences):
        expected = plain_attention(q[i : i + 1], k, v, rule) if lengths[i] else torch.zeros_like(q[:1])
        assert error(out[i : i + 1], expected) < attention_tolerance(dtype, head_dim, cache_dtype), i
