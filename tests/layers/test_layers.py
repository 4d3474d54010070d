"""Layers against the formulas that define them, and the shards of all ranks against the whole matrix."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F

from nanovllm.distributed.group import Group, use_group
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.decode_attention import paged_decode_attention_torch
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, store_kvcache
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    divide,
)
from nanovllm.layers.residual_stream import Stream
from nanovllm.layers.rotary_embedding import RotaryEmbedding, apply_rotary_emb, get_rope
from nanovllm.utils.context import get_context, reset_context, set_context
from tiny_checkpoints import one_thread  # noqa: F401

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=2e-2, rtol=2e-2)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    yield
    reset_context()


def rms_norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


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


def test_rms_norm_normalises_in_float32():
    """Squares of these do not fit float16."""
    norm = RMSNorm(32).to(torch.float16)
    y = norm(torch.full((2, 32), 1000.0, dtype=torch.float16))
    torch.testing.assert_close(y, torch.ones(2, 32, dtype=torch.float16))


def test_rms_norm_uses_eps():
    torch.testing.assert_close(RMSNorm(8, 3.0)(torch.ones(1, 8)), torch.full((1, 8), 0.5))


def make_rope(head_dim: int = 16, theta: float = 10000.0, length: int = 4096) -> RotaryEmbedding:
    return get_rope(head_dim, length, {"rope_type": "default", "rope_theta": theta})


def rotate(x: list[float], position: int, theta: float) -> list[float]:
    """One head, one position, straight from the definition: halves, not neighbouring pairs."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


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


def test_rotary_scores_depend_on_the_distance_alone():
    rope = make_rope()
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at: int, other: int) -> float:
        rotated_query, _ = rope(torch.tensor([at]), query, key)
        _, rotated_key = rope(torch.tensor([other]), query, key)
        return float((rotated_query * rotated_key).sum())

    assert score(10, 3) == pytest.approx(score(1010, 1003), abs=1e-3)
    assert score(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-5)
    assert score(10, 3) != pytest.approx(score(3, 10), abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_keeps_the_dtype(dtype):
    x = torch.randn(4, 2, 16).to(dtype)
    rope = get_rope(16, 64, {"rope_type": "default", "rope_theta": 10000.0})
    y = apply_rotary_emb(x, *rope.angles(torch.tensor([3, 0, 17, 63])))
    assert y.dtype == dtype and y.shape == x.shape
    torch.testing.assert_close(y.float().norm(dim=-1), x.float().norm(dim=-1), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_gates_the_second_half_with_the_first(dtype):
    x = torch.randn(5, 24).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(SiluAndMul()(x).double(), gate / (1 + (-gate).exp()) * up, **tolerance(dtype))


def attention_formula(q, k, v, scale):
    """Causal attention of one sequence: the queries are the last len(q) of its positions."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    future = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.double()).reshape(len(q), -1).float()


def paged(lengths: list[int], block_size: int, num_blocks: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Block tables over a shuffled pool, and the slots of each sequence's positions."""
    ids = torch.randperm(num_blocks).tolist()
    tables = torch.zeros(len(lengths), max(-(-length // block_size) for length in lengths), dtype=torch.int32)
    slots = []
    for row, length in zip(tables, lengths, strict=True):
        count = -(-length // block_size)
        row[:count] = torch.tensor([ids.pop() for _ in range(count)])
        positions = torch.arange(length)
        slots.append(row[positions // block_size].long() * block_size + positions % block_size)
    return tables, slots


def stored(layer: Attention, q, k, v) -> torch.Tensor:
    """Store keys and values, which are rotated by nothing at position 0, and attend."""
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    rope, positions = make_rope(layer.head_dim), torch.zeros(len(q), dtype=torch.int64)
    return layer(*layer.rotate_and_store(positions, qkv, rope, None, None))


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


class OneRank(Group):
    """Sums over the ranks are this rank's part."""

    def all_reduce(self, x):
        return x

    def all_reduce_add_rms_norm(self, x, residual, weight, eps):
        return rms_norm_formula(x + residual, weight, eps).float(), x + residual


def on_rank(rank, size, make):
    """Build a layer as that rank would."""
    with use_group(OneRank(rank, size)):
        return make()


def normalised(x: torch.Tensor) -> Stream:
    """A stream whose norm gives x."""
    return Stream(x, RMSNorm(x.shape[-1]), x)


def load(param: torch.nn.Parameter, weight: torch.Tensor, *shard_id) -> None:
    param.weight_loader(param, weight, *shard_id)


TP_SIZES = pytest.mark.parametrize("tp_size", [1, 2, 4])


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


@TP_SIZES
def test_merged_shards_put_together_are_the_matrices(tp_size):
    sizes = [12, 20, 4]
    full = [torch.randn(size, 10) for size in sizes]
    biases = [torch.randn(size) for size in sizes]
    parts, bias_parts = [[], [], []], [[], [], []]
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: MergedColumnParallelLinear(10, sizes, bias=True))
        for i in (2, 0, 1):
            load(layer.weight, full[i], i)
            load(layer.bias, biases[i], i)
        split = [size // tp_size for size in sizes]
        for i, (part, bias_part) in enumerate(
            zip(layer.weight.split(split), layer.bias.split(split), strict=True)
        ):
            parts[i].append(part.data)
            bias_parts[i].append(bias_part.data)
    for i in range(3):
        assert torch.equal(torch.cat(parts[i]), full[i]) and torch.equal(torch.cat(bias_parts[i]), biases[i])


@TP_SIZES
@pytest.mark.parametrize("heads, kv_heads", [(8, 4), (4, 4), (12, 4), (8, None)])
def test_qkv_shards_put_together_are_the_matrices(tp_size, heads, kv_heads):
    head_dim, hidden = 6, 10
    sizes = [heads * head_dim, (kv_heads or heads) * head_dim, (kv_heads or heads) * head_dim]
    full, biases = [torch.randn(size, hidden) for size in sizes], [torch.randn(size) for size in sizes]
    parts, bias_parts = [[], [], []], [[], [], []]
    for rank in range(tp_size):
        layer = on_rank(
            rank, tp_size, lambda: QKVParallelLinear(hidden, head_dim, heads, kv_heads, bias=True)
        )
        for shard_id, weight, bias in zip("qkv", full, biases, strict=True):
            load(layer.weight, weight, shard_id)
            load(layer.bias, bias, shard_id)
        split = [size // tp_size for size in sizes]
        for i, (part, bias_part) in enumerate(
            zip(layer.weight.split(split), layer.bias.split(split), strict=True)
        ):
            parts[i].append(part.data)
            bias_parts[i].append(bias_part.data)
    for i in range(3):
        assert torch.equal(torch.cat(parts[i]), full[i]) and torch.equal(torch.cat(bias_parts[i]), biases[i])


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
def test_a_replicated_matrix_is_whole_on_every_rank(tp_size):
    weight, bias = torch.randn(7, 5), torch.randn(7)
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: ReplicatedLinear(5, 7, bias=True))
        load(layer.weight, weight)
        load(layer.bias, bias)
        x = torch.randn(2, 5)
        torch.testing.assert_close(layer(normalised(x)), F.linear(x, weight, bias))


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


@TP_SIZES
@pytest.mark.parametrize("vocab", [32, 35])
def test_masked_look_ups_of_all_ranks_add_up_to_the_look_up(tp_size, vocab):
    table, ids = torch.randn(vocab, 8), torch.randint(0, vocab, (50,))
    total = torch.zeros(50, 8)
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: VocabParallelEmbedding(vocab, 8))
        load(layer.weight, table)
        total += layer(ids)
    assert torch.equal(total, table[ids])


def test_the_lm_head_computes_the_last_position_of_each_sequence_in_prefill_and_all_in_decode():
    layer = ParallelLMHead(11, 8)
    table, hidden = torch.randn(11, 8), torch.randn(6, 8)
    load(layer.weight, table)
    set_context(True, cu_seqlens_q=torch.tensor([0, 1, 4, 6], dtype=torch.int32))
    torch.testing.assert_close(layer(hidden), hidden[[0, 3, 5]] @ table.T)
    set_context(False)
    torch.testing.assert_close(layer(hidden), hidden @ table.T)


WRONG = {
    "column": (lambda: ColumnParallelLinear(8, 16), (16, 8), ()),
    "merged": (lambda: MergedColumnParallelLinear(8, [16, 4]), (16, 8), (0,)),
    "q": (lambda: QKVParallelLinear(8, 4, 4, 2), (16, 8), ("q",)),
    "k": (lambda: QKVParallelLinear(8, 4, 4, 2), (8, 8), ("k",)),
    "v": (lambda: QKVParallelLinear(8, 4, 4, 2), (8, 8), ("v",)),
    "row": (lambda: RowParallelLinear(16, 8), (8, 16), ()),
    "replicated": (lambda: ReplicatedLinear(8, 16), (16, 8), ()),
    "embedding": (lambda: VocabParallelEmbedding(16, 8), (16, 8), ()),
    "head": (lambda: ParallelLMHead(16, 8), (16, 8), ()),
    "norm": (lambda: RMSNorm(16), (16,), ()),
}


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_a_weight_of_the_wrong_shape_is_refused(name, tp_size):
    make, shape, shard_id = WRONG[name]
    layer = on_rank(tp_size - 1, tp_size, make)
    load(layer.weight, torch.randn(shape), *shard_id)
    wrong = [(*shape, 1), shape[:-1], (shape[0] + 2, *shape[1:]), (shape[0] // 2, *shape[1:])]
    if len(shape) == 2:
        wrong += [(shape[0], shape[1] * 2), (shape[0], shape[1] // 2), (shape[0], 1)]
    for other in wrong:
        with pytest.raises(ValueError):
            load(layer.weight, torch.randn(other), *shard_id)


def test_a_bias_of_the_wrong_shape_is_refused():
    for layer in (
        ColumnParallelLinear(8, 16, True),
        RowParallelLinear(8, 16, True),
        ReplicatedLinear(8, 16, True),
    ):
        for shape in [(15,), (1,), (16, 1), ()]:
            with pytest.raises(ValueError):
                load(layer.bias, torch.randn(shape))


def test_sizes_that_the_ranks_do_not_divide_are_refused():
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="13.*4"):
        divide(13, 4)
    for make in (
        lambda: ColumnParallelLinear(8, 18),
        lambda: RowParallelLinear(18, 8),
        lambda: MergedColumnParallelLinear(8, [16, 6]),
        lambda: QKVParallelLinear(8, 4, 6, 6),
        lambda: QKVParallelLinear(8, 4, 12, 6),
        lambda: QKVParallelLinear(8, 4, 12, 3),
    ):
        with pytest.raises(ValueError):
            on_rank(0, 4, make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_multiplies_as_before_and_its_unpacked_copy_is_gone(dtype, rows, bias):
    layer = ReplicatedLinear(48, 80, bias).to(dtype)
    layer.matrix.weight.data.normal_()
    if bias:
        layer.bias.data.normal_()
    before, weight = weakref.ref(layer.weight), layer.weight.detach().clone()
    x = normalised(torch.randn(rows, 48, dtype=dtype))
    expected = layer(x)
    layer.finish()
    assert layer.weight.is_mkldnn and before() is None
    torch.testing.assert_close(layer(x), expected, **tolerance(dtype))
    torch.testing.assert_close(layer.weight.to_dense(), weight, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_is_packed_and_the_embedding_still_looks_rows_up(dtype):
    embedding, head = VocabParallelEmbedding(40, 16).to(dtype), ParallelLMHead(40, 16).to(dtype)
    embedding.weight.data.normal_()
    head.tie_to(embedding)
    x = torch.randn(3, 16, dtype=dtype)
    expected, ids = head.logits(x), torch.tensor([0, 39])
    head.finish()
    torch.testing.assert_close(head.logits(x), expected, **tolerance(dtype))
    torch.testing.assert_close(embedding(ids), embedding.weight[ids])


def test_an_untied_head_keeps_its_weight_once():
    head = ParallelLMHead(40, 16)
    head.weight.data.normal_()
    head.finish()
    assert head.weight.is_mkldnn


def test_weights_stay_as_they_are_where_onednn_cannot_multiply_them(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    layer, head = ReplicatedLinear(16, 16), ParallelLMHead(40, 16)
    for module in (layer, head):
        module.finish()
        assert not module.weight.is_mkldnn


@pytest.mark.parametrize("blocks", [[0], [2, 3, 4], [4, 1, 3]])
def test_a_single_sequence_attends_to_its_own_blocks_only(blocks):
    """Side by side they are read where they lie; nothing beyond the sequence's end counts."""
    k_cache, v_cache = torch.full((2, 6, 4, 2, 8), float("nan")).unbind(0)
    keys, values = torch.randn(2, len(blocks) * 4 - 1, 2, 8).unbind(0)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        k_cache[blocks[i // 4], i % 4], v_cache[blocks[i // 4], i % 4] = key, value
    q = torch.randn(1, 6, 8)
    tables = torch.tensor([[*blocks, 0]], dtype=torch.int32)
    out = paged_decode_attention_torch(
        q, k_cache, v_cache, tables, torch.tensor([len(keys)]), AttentionVariant(0.3)
    )
    wide = [x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (keys, values)]
    weights = (q.transpose(0, 1) @ wide[0].transpose(1, 2) * 0.3).softmax(-1)
    torch.testing.assert_close(out, (weights @ wide[1]).transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert not paged_decode_attention_torch(
        q, k_cache, v_cache, tables, torch.tensor([0]), AttentionVariant(0.3)
    ).any()
