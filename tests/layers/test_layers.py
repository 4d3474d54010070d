"""Layers beyond tests/core: more dtypes and shards, weights that are refused, and weights that are packed."""

import pytest
import torch
import torch.nn.functional as F
from layer_checks import (
    DTYPES,
    TP_SIZES,
    load,
    make_rope,
    normalised,
    on_rank,
    tolerance,
    without_context,  # noqa: F401
)

from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.decode_attention import paged_decode_attention_torch
from nanovllm.kernels.kv_store import ROWS
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
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.utils.context import Context
from tiny_checkpoints import one_thread  # noqa: F401


def test_rms_norm_normalises_in_float32():
    """Squares of these do not fit float16."""
    norm = RMSNorm(32).to(torch.float16)
    y = norm(torch.full((2, 32), 1000.0, dtype=torch.float16))
    torch.testing.assert_close(y, torch.ones(2, 32, dtype=torch.float16))


def test_rms_norm_uses_eps():
    torch.testing.assert_close(RMSNorm(8, 3.0)(torch.ones(1, 8)), torch.full((1, 8), 0.5))


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
    y, _ = rope(torch.tensor([3, 0, 17, 63]), x, x)
    assert y.dtype == dtype and y.shape == x.shape
    torch.testing.assert_close(y.float().norm(dim=-1), x.float().norm(dim=-1), **tolerance(dtype))


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
def test_a_replicated_matrix_is_whole_on_every_rank(tp_size):
    weight, bias = torch.randn(7, 5), torch.randn(7)
    for rank in range(tp_size):
        layer = on_rank(rank, tp_size, lambda: ReplicatedLinear(5, 7, bias=True))
        load(layer.weight, weight)
        load(layer.bias, bias)
        x = torch.randn(2, 5)
        torch.testing.assert_close(layer(normalised(x)), F.linear(x, weight, bias))


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


@pytest.mark.parametrize("blocks", [[0], [2, 3, 4], [4, 1, 3]])
def test_a_single_sequence_attends_to_its_own_blocks_only(blocks):
    """Side by side they are read where they lie; nothing beyond the sequence's end counts."""
    k_cache, v_cache = torch.full((2, 6, 4, 2, 8), float("nan")).unbind(0)
    keys, values = torch.randn(2, len(blocks) * 4 - 1, 2, 8).unbind(0)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        k_cache[blocks[i // 4], i % 4], v_cache[blocks[i // 4], i % 4] = key, value
    q = torch.randn(1, 6, 8)
    tables = torch.tensor([[*blocks, 0]], dtype=torch.int32)
    step = Context(context_lens=torch.tensor([len(keys)]), block_tables=tables)
    out = paged_decode_attention_torch(q, k_cache, v_cache, AttentionVariant(0.3), step, ROWS)
    wide = [x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (keys, values)]
    weights = (q.transpose(0, 1) @ wide[0].transpose(1, 2) * 0.3).softmax(-1)
    torch.testing.assert_close(out, (weights @ wide[1]).transpose(0, 1), atol=1e-5, rtol=1e-5)
    step.context_lens = torch.tensor([0])
    assert not paged_decode_attention_torch(q, k_cache, v_cache, AttentionVariant(0.3), step, ROWS).any()


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
