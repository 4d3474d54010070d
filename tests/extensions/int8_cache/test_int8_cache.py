"""The 8-bit KV cache in torch: what its bytes mean, and attention over them against plain attention."""

import pytest
import torch
from cascades import SMALL, check
from extension_kernels import INT8
from kernel_checks import (
    NAN,
    check_decode,
    check_prefill,
    empty_caches,
    error,
    layout_of,
    paged_caches,
    plain_attention,
    rand,
    store_torch,
)

from nanovllm.extensions.int8_cache.kernels.int8_cache import (
    as_stored,
    hadamard_rotate,
    page_sizes,
    quantize,
)
from nanovllm.extensions.prefixes.kernels.shared_prefix import cascade_attention_torch
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.decode_attention import paged_decode_attention_torch
from nanovllm.kernels.prefill_attention import varlen_prefill_attention_torch
from nanovllm.utils.context import Context

HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256]
on_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def assert_within_bound(x: torch.Tensor) -> None:
    """No element is further from the stored one than half a step, or than what is as good as 0."""
    values, scales = quantize(x)
    assert values.dtype == INT8 and scales.dtype == torch.bfloat16 and scales.shape == x.shape[:-1]
    assert scales.isfinite().all() and values.min() >= 1
    bound = (0.5 + 1e-4) * scales.double()[..., None] + 127e-30
    assert ((as_stored(x).double() - x.double()).abs() <= bound).all()


@on_head_dims
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_element_is_off_by_more_than_half_a_step(head_dim, dtype):
    x = rand(50, 3, head_dim) * torch.logspace(-3, 3, 50)[:, None, None]
    assert_within_bound(x.to(dtype))
    steps = as_stored(x).abs().amax(-1) / quantize(x)[1].float()
    assert (steps == 127).all(), "the largest element has the largest byte"


EXTREMES = {
    "all zero": lambda x: x * 0,
    "1e-8 throughout": lambda x: x * 0 + 1e-8,
    "one huge value": lambda x: x.index_fill(-1, torch.tensor([5]), 1e30),
    "one huge negative value": lambda x: x.index_fill(-1, torch.tensor([0]), -1e30),
    "all huge": lambda x: x.sign() * 1e30,
    "subnormal": lambda x: x * 1e-42,
    "the smallest steps": lambda x: x * 1e-28,
}


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_extreme_vectors_stay_finite_and_within_the_bound(kind, head_dim):
    x = EXTREMES[kind](rand(4, 2, head_dim))
    for vectors in (x, x.bfloat16(), hadamard_rotate(x)):
        assert vectors.isfinite().all() and as_stored(vectors).isfinite().all()
        assert_within_bound(vectors)
    if kind == "all zero":
        assert not as_stored(x).any()


def test_a_vector_is_stored_the_same_whatever_its_neighbours():
    x = rand(9, 2, 64)
    assert torch.equal(as_stored(x)[3:5], as_stored(x[3:5]))
    assert torch.equal(as_stored(as_stored(x)), as_stored(x))


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 20, 8])
def test_the_rotation_is_orthonormal_and_leaves_products_as_they_were(head_dim):
    matrix = hadamard_rotate(torch.eye(head_dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), atol=1e-6, rtol=0)
    q, k = rand(5, 3, head_dim), rand(5, 3, head_dim)
    products = (hadamard_rotate(q) * hadamard_rotate(k)).sum(-1)
    torch.testing.assert_close(products, (q * k).sum(-1), atol=1e-4, rtol=1e-4)
    assert hadamard_rotate(q.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("head_dim, size", [(128, 64), (80, 8), (96, 16), (112, 8), (20, 2)])
def test_the_halves_are_mixed_and_blocks_inside_them_in_sylvesters_order(head_dim, size):
    pair = matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < size:
        matrix = torch.kron(pair, matrix)
    blocks = torch.kron(torch.eye(head_dim // 2 // size), matrix)
    signs = hadamard_rotate(torch.eye(head_dim)) * (2 * size) ** 0.5
    torch.testing.assert_close(signs, torch.kron(pair, blocks))


@on_head_dims
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("tokens", [1, 40])
def test_pages_hold_the_tokens_stored_in_them_and_nothing_else_changes(head_dim, block_size, tokens):
    kv_heads = 3
    caches = empty_caches(4, block_size, kv_heads, head_dim, "cpu", INT8)
    page = caches[0]
    layout = layout_of(INT8)
    assert layout.planes == 1 and page.shape[1:] == layout.page_shape(block_size, kv_heads, head_dim)
    assert page.shape[1:] == (kv_heads, block_size * (2 * head_dim + 4))
    assert page_sizes(page, head_dim) == (block_size, kv_heads)
    expected = page.clone()
    slots = torch.randperm(4 * block_size)[:tokens].to(torch.int32)
    slots[3::4] = -1
    key, value = rand(tokens, kv_heads, head_dim), rand(tokens, kv_heads, head_dim)
    store_torch(key, value, *caches, slots)
    dim = torch.arange(head_dim)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, place = divmod(slot, block_size)
        for head in range(kv_heads):
            bytes_of = expected[block, head]
            values_at, scales_at = block_size * head_dim, 2 * block_size * head_dim + 4 * place
            bytes_of[place * head_dim + dim], key_scale = quantize(key[token, head])
            values_at += place // 16 * 16 * head_dim
            bytes_of[values_at + dim * 16 + place % 16], value_scale = quantize(value[token, head])
            bytes_of[scales_at : scales_at + 4] = torch.stack([key_scale, value_scale]).view(INT8)
    assert torch.equal(page, expected)


def test_reading_gives_the_tokens_of_a_span_in_their_order():
    k_cache, v_cache, tables, sequences = paged_caches([70, 0, 33], 16, 2, 64, "cpu", INT8)
    for table, begin, end, kv in zip(tables, (21, 0, 16), (70, 0, 33), sequences, strict=True):
        read = layout_of(INT8).read(k_cache, v_cache, table, begin, end, torch.empty(64))
        for found, expected in zip(read, kv, strict=True):
            assert torch.equal(found.transpose(0, 1), expected[begin:])


SHAPES = [(16, 8, 128), (8, 2, 80), (9, 3, 64), (5, 1, 96), (4, 2, 256), (3, 1, 20)]
on_shapes = pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)


@on_shapes
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_decode_attends_to_exactly_the_context(heads, kv_heads, head_dim, block_size):
    """Beyond it stand any bytes, and scales that are no numbers."""
    options = heads, kv_heads, head_dim, block_size, "cpu", torch.float32, INT8
    check_decode(paged_decode_attention_torch, [1, 16, 0, 17, 100, 48, 33, 0], *options)
    check_decode(paged_decode_attention_torch, [0, 0], *options)


@on_shapes
@pytest.mark.parametrize("block_size", [16, 256])
def test_prefill_is_causal_and_aligned_at_the_end(heads, kv_heads, head_dim, block_size):
    lengths, shape = [(5, 5), (1, 40), (0, 7), (33, 33), (16, 70)], (heads, kv_heads, head_dim)
    check_prefill(varlen_prefill_attention_torch, lengths, *shape, "cpu", torch.float32, block_size, INT8)


@on_shapes
@pytest.mark.parametrize("groups, piece", [(SMALL, 1000), (SMALL, 48)])
def test_decode_reads_common_tokens_from_one_table(groups, piece, heads, kv_heads, head_dim):
    options = heads, kv_heads, head_dim, 16, piece, "cpu", torch.float32
    check(cascade_attention_torch, groups, *options, padding=3, cache_dtype=INT8)


def test_attention_in_bfloat16_reads_8_bit_pages():
    options = 4, 2, 64, 16, "cpu", torch.bfloat16
    check_decode(paged_decode_attention_torch, [70, 3], *options, INT8)
    check_prefill(varlen_prefill_attention_torch, [(5, 40)], 4, 2, 64, "cpu", torch.bfloat16, 16, INT8)


def attend_to_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode attention of one query over all of k and v, through a cache of this dtype."""
    length, kv_heads, head_dim = k.shape
    num_blocks = -(-length // 256)
    layout = layout_of(dtype)
    shape = layout.planes, num_blocks, *layout.page_shape(256, kv_heads, head_dim)
    pages = torch.zeros(shape, dtype=dtype)
    caches = pages[0], pages[-1]
    q, k = layout.rotate(q, k)
    store_torch(k, v, *caches, torch.arange(length))
    step = Context(context_lens=torch.tensor([length]), block_tables=torch.arange(num_blocks)[None])
    return paged_decode_attention_torch(q, *caches, AttentionVariant(head_dim**-0.5), step, layout)


@pytest.mark.parametrize("place", [0, 17_003, 31_999])
def test_a_needle_is_found_among_32000_tokens_as_with_bfloat16(place):
    """A random layer's query for a planted key takes over the value there, which is one of 32,000."""
    heads, head_dim = 2, 128
    hidden = rand(32_000, 256)
    to_key, to_value = rand(256, heads * head_dim) / 16, rand(256, heads * head_dim) / 16
    k = (hidden @ to_key).unflatten(1, (heads, head_dim))
    v = (hidden @ to_value).unflatten(1, (heads, head_dim))
    for sharpness in (3, 1):  # at 1 it competes with all the others
        q = sharpness * k[place : place + 1] + rand(1, heads, head_dim) / 2
        exact = plain_attention(q, k, v, AttentionVariant(head_dim**-0.5))
        assert error(exact, v[place : place + 1]) < 0.02 or sharpness == 1
        for dtype in (torch.bfloat16, INT8):
            assert error(attend_to_one(q, k, v, dtype), exact) < 0.02


@pytest.mark.parametrize("kind", EXTREMES)
def test_attention_over_an_extreme_token_is_finite(kind):
    k, v = rand(40, 1, 64), rand(40, 1, 64)
    k[7], v[9] = EXTREMES[kind](k[7]), EXTREMES[kind](v[9])
    q = rand(1, 1, 64)
    found, exact = attend_to_one(q, k, v, INT8), attend_to_one(q, k, v, torch.float32)
    assert found.isfinite().all()
    if "huge" not in kind:
        assert error(found, exact) < 0.03


def test_what_an_ended_sequence_left_does_no_harm():
    """Not even a number that is none."""
    k_cache, v_cache = empty_caches(1, 16, 1, 64, "cpu", INT8)
    store_torch(
        torch.full((16, 1, 64), NAN), torch.full((16, 1, 64), NAN), k_cache, v_cache, torch.arange(16)
    )
    key, value = rand(1, 1, 64), rand(1, 1, 64)
    store_torch(key, value, k_cache, v_cache, torch.tensor([0]))
    step = Context(context_lens=torch.tensor([1]), block_tables=torch.tensor([[0]]))
    variant, layout = AttentionVariant(1.0), layout_of(INT8)
    out = paged_decode_attention_torch(rand(1, 1, 64), k_cache, v_cache, variant, step, layout)
    torch.testing.assert_close(out, as_stored(value))
