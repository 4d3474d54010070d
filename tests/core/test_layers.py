"""Layers against the formulas that define them, and the shards of all ranks against the whole matrix."""

import pytest
import torch
import torch.nn.functional as F
from layer_checks import (
    DTYPES,
    TP_SIZES,
    attention_formula,
    load,
    make_rope,
    normalised,
    on_rank,
    paged,
    rms_norm_formula,
    rotate,
    stored,
    tolerance,
    without_context,  # noqa: F401
)

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, store_kvcache
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.utils.context import get_context, reset_context, set_context
from tiny_checkpoints import one_thread  # noqa: F401


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (1, 48), (7, 3, 20)])
def test_rms_norm_is_its_formula_and_leaves_its_input_alone(dtype, shape):
    norm = RMSNorm(shape[-1], 1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(shape).to(dtype) * 3
    before = x.clone()
    y = norm(x)
    assert y.dtype == dtype and torch.equal(x, before)
    torch.testing.assert_close(y.double(), rms_norm_formula(x, norm.weight, 1e-5), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_a_residual_returns_the_normalised_sum_and_the_sum(dtype):
    norm = RMSNorm(64).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x, residual = torch.randn(6, 64).to(dtype), torch.randn(6, 64).to(dtype)
    before = x.clone(), residual.clone()
    y, total = norm(x, residual)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    assert y.dtype == total.dtype == dtype
    torch.testing.assert_close(total, x + residual, **tolerance(dtype))
    torch.testing.assert_close(
        y.double(), rms_norm_formula(x + residual, norm.weight, 1e-6), **tolerance(dtype)
    )


@pytest.mark.parametrize("head_dim, theta", [(16, 10000.0), (20, 500.0)])
def test_rotary_embedding_is_its_formula(head_dim, theta):
    rope = make_rope(head_dim, theta)
    positions = torch.tensor([0, 1, 2, 77, 4095, 5])
    query, key = torch.randn(6, 3, head_dim), torch.randn(6, 1, head_dim)
    before = query.clone(), key.clone()
    for x, rotated in zip((query, key), rope(positions, query, key), strict=True):
        expected = [
            [rotate(head.tolist(), int(position), theta) for head in heads]
            for heads, position in zip(x, positions, strict=True)
        ]
        torch.testing.assert_close(rotated, torch.tensor(expected), atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(rotated[:3], torch.tensor(expected)[:3], atol=1e-5, rtol=1e-5)
    assert torch.equal(query, before[0]) and torch.equal(key, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_gates_the_second_half_with_the_first(dtype):
    x = torch.randn(5, 24).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(SiluAndMul()(x).double(), gate / (1 + (-gate).exp()) * up, **tolerance(dtype))


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 16), (3, 3, 8), (7, 1, 24), (8, 1, 64)])
@pytest.mark.parametrize("computed", [(0, 0, 0, 0), (3, 16, 40, 0)])
def test_attention_over_pages_is_attention(heads, kv_heads, head_dim, computed):
    """Prefill, with or without a beginning in the cache, then a decode step, for unlike lengths."""
    lengths, block_size, scale = [5, 33, 48, 1], 16, head_dim**-0.5
    layer = Attention(heads, head_dim, scale, kv_heads)
    tables, slots = paged([length + 1 for length in lengths], block_size, 16)
    caches = torch.full((2, 16, block_size, kv_heads, head_dim), 1e4)  # what is not written must not be read
    layer.k_cache, layer.v_cache = caches
    q, k, v = (
        [torch.randn(length + 1, count, head_dim) for length in lengths]
        for count in (heads, kv_heads, kv_heads)
    )
    for i, begin in enumerate(computed):  # as if an earlier step had computed these
        layer.k_cache.view(-1, kv_heads, head_dim)[slots[i][:begin]] = k[i][:begin]
        layer.v_cache.view(-1, kv_heads, head_dim)[slots[i][:begin]] = v[i][:begin]

    spans = [slice(begin, length) for begin, length in zip(computed, lengths, strict=True)]
    counts = [span.stop - span.start for span in spans]
    set_context(
        True,
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        cu_seqlens_k=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_seqlen_q=max(counts),
        max_seqlen_k=max(lengths),
        slot_mapping=torch.cat([s[span] for s, span in zip(slots, spans, strict=True)]).to(torch.int32),
        context_lens=None,
        block_tables=tables if any(computed) else None,
    )
    out = stored(layer, *(torch.cat([t[span] for t, span in zip(x, spans, strict=True)]) for x in (q, k, v)))
    for i, rows in enumerate(out.split(counts)):
        expected = attention_formula(q[i][spans[i]], k[i][: lengths[i]], v[i][: lengths[i]], scale)
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-4)

    set_context(
        False,
        slot_mapping=torch.tensor([s[-1] for s in slots], dtype=torch.int32),
        context_lens=torch.tensor([length + 1 for length in lengths], dtype=torch.int32),
        block_tables=tables,
    )
    out = stored(layer, *(torch.stack([t[-1] for t in x]) for x in (q, k, v)))
    for i, row in enumerate(out):
        torch.testing.assert_close(
            row[None], attention_formula(q[i][-1:], k[i], v[i], scale), atol=1e-5, rtol=1e-4
        )


def test_a_slot_of_minus_one_writes_nothing():
    k_cache, v_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    key, value = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    store_kvcache(key, value, k_cache, v_cache, torch.tensor([5, -1, 0], dtype=torch.int32))
    for cache, x in ((k_cache, key), (v_cache, value)):
        flat = cache.view(8, 1, 8)
        assert torch.equal(flat[5], x[0]) and torch.equal(flat[0], x[2])
        assert flat[[1, 2, 3, 4, 6, 7]].abs().max() == 0


def test_the_context_is_empty_after_a_reset():
    set_context(True, max_seqlen_q=7, slot_mapping=torch.zeros(1))
    assert get_context().is_prefill and get_context().max_seqlen_q == 7
    reset_context()
    assert not get_context().is_prefill and get_context().slot_mapping is None


@TP_SIZES
def test_column_shards_put_together_are_the_matrix(tp_size):
    weight, bias = torch.randn(24, 10), torch.randn(24)
    weights, biases = [], []
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: ColumnParallelLinear(10, 24, bias=True))
        load(layer.weight, weight)
        load(layer.bias, bias)
        assert layer.weight.shape == (24 // tp_size, 10)
        weights.append(layer.weight.data)
        biases.append(layer.bias.data)
        x = torch.randn(3, 10)
        torch.testing.assert_close(layer(normalised(x)), F.linear(x, layer.weight, layer.bias))
    assert torch.equal(torch.cat(weights), weight) and torch.equal(torch.cat(biases), bias)


@pytest.mark.parametrize("kv_heads, tp_size", [(1, 2), (1, 4), (2, 4)])
def test_fewer_kv_heads_than_ranks_are_held_by_neighbouring_ranks(kv_heads, tp_size):
    """Each rank needs the KV head that its query heads belong to."""
    heads, head_dim, hidden = 8, 6, 10
    full = {"q": torch.randn(heads, head_dim, hidden)}
    full |= {name: torch.randn(kv_heads, head_dim, hidden) for name in "kv"}
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: QKVParallelLinear(hidden, head_dim, heads, kv_heads))
        for shard_id, weight in full.items():
            load(layer.weight, weight.flatten(0, 1), shard_id)
        rows = layer.weight.data.view(-1, head_dim, hidden)
        mine = heads // tp_size
        first = rank * mine
        assert torch.equal(rows[:mine], full["q"][first : first + mine])
        kv_head = first // (heads // kv_heads)
        assert torch.equal(rows[mine], full["k"][kv_head]) and torch.equal(rows[mine + 1], full["v"][kv_head])
        assert len(rows) == mine + 2


@TP_SIZES
@pytest.mark.parametrize("bias", [False, True])
def test_row_shards_put_together_are_the_matrix_and_products_add_up(tp_size, bias):
    weight, offset = torch.randn(6, 24), torch.randn(6)
    x = torch.randn(3, 24)
    residual, norm, next_norm = torch.randn(3, 6), RMSNorm(6), RMSNorm(6)
    next_norm.weight.data.uniform_(0.5, 1.5)
    shards, total = [], torch.zeros(3, 6)
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: RowParallelLinear(24, 6, bias=bias))
        load(layer.weight, weight)
        if bias:
            load(layer.bias, offset)
        shards.append(layer.weight.data)
        width = 24 // tp_size
        added = layer.add_to(Stream(residual, norm), x[:, rank * width : (rank + 1) * width], next_norm)
        assert added.norm is next_norm
        torch.testing.assert_close(added.normalised(), next_norm(added.x))
        total += added.x - residual
    assert torch.equal(torch.cat(shards, dim=1), weight)
    torch.testing.assert_close(total, F.linear(x, weight, offset if bias else None))


@TP_SIZES
@pytest.mark.parametrize("vocab", [32, 33, 35, 5])
@pytest.mark.parametrize("make", [VocabParallelEmbedding, ParallelLMHead])
def test_vocabulary_shards_put_together_are_the_table(tp_size, vocab, make):
    table = torch.randn(vocab, 8)
    rows = []
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: make(vocab, 8))
        load(layer.weight, table)
        rows.append(layer.weight.data)
    rows = torch.cat(rows)
    assert torch.equal(rows[:vocab], table)
    assert rows[vocab:].abs().sum() == 0, "what pads the last ranks"


def test_the_lm_head_computes_the_last_position_of_each_sequence_in_prefill_and_all_in_decode():
    layer = ParallelLMHead(11, 8)
    table, hidden = torch.randn(11, 8), torch.randn(6, 8)
    load(layer.weight, table)
    set_context(True, cu_seqlens_q=torch.tensor([0, 1, 4, 6], dtype=torch.int32))
    torch.testing.assert_close(layer(hidden), hidden[[0, 3, 5]] @ table.T)
    set_context(False)
    torch.testing.assert_close(layer(hidden), hidden @ table.T)
