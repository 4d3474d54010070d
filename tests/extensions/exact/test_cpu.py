"""What a CPU computes of a row has the same bits whatever stands beside it, with any number of threads."""

import pytest
import torch

from nanovllm.extensions.exact.kernels.attention_torch import ExactVariant
from nanovllm.extensions.exact.products import exact_linear, exact_silu_and_mul
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.decode_attention import paged_decode_attention_torch
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.kernels.prefill_attention import varlen_prefill_attention_torch
from nanovllm.utils.context import Context

TOKENS = 304
BLOCK_SIZE = 16
SHAPES = [(1, 1, 64), (2, 2, 16), (1, 6, 10), (3, 1, 20), (8, 2, 64), (2, 7, 128)]  # kv heads, heads of each
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def prefill(q, k, v, *parts: tuple[int, int], kind=ExactVariant):
    """Attention of parts of one sequence, from one token to another, as sequences of one step."""
    step = Context(is_prefill=True)
    step.cu_seqlens_q = torch.tensor([0, *(end - begin for begin, end in parts)]).cumsum(0)
    step.cu_seqlens_k = torch.tensor([0, *(end for _, end in parts)]).cumsum(0)
    q = torch.cat([q[begin:end] for begin, end in parts])
    k, v = (torch.cat([x[:end] for _, end in parts]) for x in (k, v))
    return varlen_prefill_attention_torch(q, k, v, kind(q.shape[-1] ** -0.5), step, CacheLayout())


def decode(q, k, v, ends: list[int]):
    """Attention of the tokens before these ends, each as a sequence of its own."""
    order = torch.randperm(TOKENS // BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    k, v = (x.unflatten(0, (-1, BLOCK_SIZE))[order] for x in (k, v))
    step = Context(context_lens=torch.tensor(ends))
    step.block_tables = order.argsort().int().expand(len(ends), -1)
    q = q[[max(0, end - 1) for end in ends]]
    return paged_decode_attention_torch(
        q, k, v, ExactVariant(q.shape[-1] ** -0.5), step, CacheLayout(q.dtype)
    )


def random_inputs(shape, dtype):
    kv_heads, heads, head_dim = shape
    torch.manual_seed(3)
    sizes = kv_heads * heads, kv_heads, kv_heads
    return [torch.randn(TOKENS, size, head_dim).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_a_token_is_the_same_in_whole_prompts_chunks_and_decode(shape, dtype, threads):
    inputs = random_inputs(shape, dtype)
    whole = prefill(*inputs, (0, TOKENS))
    parts = [(0, 1), (1, 40), (40, 41), (41, 70), (70, 199), (199, TOKENS)]
    assert torch.equal(prefill(*inputs, *parts), whole)
    assert torch.equal(torch.cat([prefill(*inputs, part) for part in parts]), whole)
    ends = [1, 2, 63, 64, 65, 128, 129, 303, TOKENS]
    rows = [end - 1 for end in ends]
    assert torch.equal(decode(*inputs, ends), whole[rows])
    assert torch.equal(torch.cat([decode(*inputs, [end]) for end in ends]), whole[rows])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_the_reference_of_the_core_computes(shape):
    inputs = random_inputs(shape, torch.float32)
    parts = [(0, 100), (37, 200)]
    expected = prefill(*inputs, *parts, kind=AttentionVariant)
    torch.testing.assert_close(prefill(*inputs, *parts), expected, rtol=1e-5, atol=1e-5)


def test_an_empty_context_gives_zeros():
    inputs = random_inputs((2, 2, 16), torch.float32)
    assert not decode(*inputs, [0, 5])[0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [100, 1000])
def test_products_and_activations_of_a_row_do_not_depend_on_the_rows_beside_it(width, dtype, threads):
    torch.manual_seed(4)
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((TOKENS, width), (80, width), (80,)))
    for compute in (exact_silu_and_mul, lambda rows: exact_linear(rows, weight, bias)):
        alone = torch.cat([compute(row) for row in x.split(1)])
        for rows in (2, 3, 37, *range(190, TOKENS, 7)):
            assert torch.equal(compute(x[:rows]), alone[:rows])
