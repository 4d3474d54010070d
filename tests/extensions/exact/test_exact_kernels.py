"""Attention and products of the exact mode: what they compute, and that their bits depend on a row alone."""

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import SHARED_MEMORY, shared_memory_of
from extension_kernels import CACHES
from kernel_checks import (
    GPU,
    HALF,
    assert_passes_in_the_interpreter,
    check_decode,
    check_prefill,
    error,
    layout_of,
    on,
    on_devices,
    paged_caches,
    rand,
    store_torch,
    tolerance,
)

from nanovllm.extensions.exact.attention import ExactBackend
from nanovllm.extensions.exact.kernels import attention
from nanovllm.extensions.exact.kernels.attention import TILE
from nanovllm.extensions.exact.kernels.ordered_sum import sum_in_order
from nanovllm.extensions.exact.kernels.product import few_rows, library_agrees, multiply, product
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED, use_triton
from nanovllm.utils.context import Context

SHAPES = [(16, 8, 128), (32, 8, 128), (4, 4, 64), (9, 3, 64), (8, 2, 80), (7, 1, 128), (3, 1, 20)]
SHAPES = [(4, 2, 64), (3, 1, 80)] if INTERPRETED else SHAPES
LENGTHS = [1, TILE, 0, 2 * TILE + 1, TILE - 1, 4 * TILE, TILE + 1, 6 * TILE + 57]
on_gpus = pytest.mark.parametrize("device", [GPU])
# GPUs compute in float16 and bfloat16 only.
TYPES = [types for types in CACHES if INTERPRETED or types[0] == HALF]
in_types = pytest.mark.parametrize("dtype, cache_dtype", TYPES, ids=str)


def attend(q, k, v, variant, step, layout):
    return ExactBackend(layout).attend(q, k, v, variant, step)


@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
@pytest.mark.slow
def test_the_kernels_compute_attention_and_products_in_tritons_interpreter():
    assert_passes_in_the_interpreter(__file__)


@on_devices
@in_types
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
def test_decode_attends_to_the_whole_context(device, dtype, cache_dtype, heads, kv_heads, head_dim):
    sizes = heads, kv_heads, head_dim
    check_decode(attend, LENGTHS, *sizes, 16, device, dtype, cache_dtype)


@on_devices
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_decode_reads_pages_of_any_size_with_splits_and_without(device, block_size, count):
    lengths = (LENGTHS * 5)[3 : 3 + count]
    check_decode(attend, lengths, 4, 2, 64, block_size, device, HALF)


@on_devices
@in_types
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("block_size", [0, 16, 256])
def test_prefill_attends_to_what_each_query_sees(
    device, dtype, cache_dtype, heads, kv_heads, head_dim, block_size
):
    lengths = [(5, 5), (0, 7), (1, 300), (130, 132), (37, 259), (256, 256), (300, 700)]
    if INTERPRETED:
        lengths = lengths[:5]
    if not block_size:
        lengths, cache_dtype = [(q, q) for q, _ in lengths], None
    check_prefill(attend, lengths, heads, kv_heads, head_dim, device, dtype, block_size, cache_dtype)


class Case:
    """A sequence in the cache, with a query of each of its tokens."""

    def __init__(self, length, heads, kv_heads, head_dim, block_size, device, dtype, cache_dtype=None):
        cache = cache_dtype or dtype
        *self.caches, tables, _ = paged_caches([length] * 2, block_size, kv_heads, head_dim, device, cache)
        self.table, self.other_table = tables.split(1)
        self.block_size, self.num_blocks = block_size, -(-length // block_size)
        self.q = rand(length, heads, head_dim, device=device, dtype=dtype) * 1.5
        self.layout, self.variant = layout_of(cache), AttentionVariant(head_dim**-0.5)
        self.device, self.length = device, length

    def numbers(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def decode(self, positions, plan=None):
        """Each query as if its token were the last one of a sequence of its own."""
        tables = self.table.expand(len(positions), -1).contiguous()
        if plan is not None:
            tables[:-1] = self.other_table
        step = Context(
            context_lens=self.numbers(*(position + 1 for position in positions)),
            block_tables=tables,
            attention_plan=plan,
        )
        return attend(self.q[positions], *self.caches, self.variant, step, self.layout)

    def prefill(self, begin, end):
        """The tokens from `begin` to `end` as a chunk."""
        step = Context(
            True,
            self.numbers(0, end - begin),
            self.numbers(0, end),
            end - begin,
            end,
            block_tables=self.table,
        )
        return attend(self.q[begin:end], *self.caches, self.variant, step, self.layout)

    def plan(self, end, common, count, heads_per_kv_head):
        """
        All queries share the tokens before `end`, and read those up to `common` in the last one's blocks. The
        others' own blocks have something else there.
        """
        own, others = (table[0, : self.num_blocks].long() for table in (self.table, self.other_table))
        token = torch.arange(end, common, device=self.device)
        slots = others[token // self.block_size] * self.block_size + token % self.block_size
        for cache in self.caches:
            cache[others] = cache[own]
        head_dim = self.q.shape[-1]
        kv_heads = self.layout.page_sizes(self.caches[0], head_dim)[1]
        wrong = [rand(len(slots), kv_heads, head_dim, device=self.device) for _ in self.caches]
        if use_triton(self.q):
            store_torch(*wrong, *self.caches, slots)
        each = 64 // heads_per_kv_head
        items = [(first, min(each, count - first), 0, end) for first in range(0, count, each)]
        plan = type("Plan", (), {})()
        plan.prefix_lens = self.numbers(*[end] * count)
        plan.readers = self.numbers(*[(count - 1, common + 5)] * count)  # a kernel reads a multiple of 16
        plan.queries, plan.work_items = self.numbers(*range(count)), self.numbers(*items)
        plan.num_work_items = self.numbers(len(items))
        return plan


@on_devices
@in_types
@pytest.mark.parametrize("end", [TILE, 3 * TILE, 4 * TILE])
def test_a_prefix_is_read_for_all_who_share_it(device, dtype, cache_dtype, end):
    case = Case(4 * TILE + 60, 4, 2, 64, 48, device, dtype, cache_dtype)
    sharing = [end, end + 1, end + 40, case.length - 1]
    alone = case.decode(sharing)
    for common in (end, end + 16):
        shared = case.decode(sharing, case.plan(end, common, len(sharing), 2))
        assert error(shared, alone) < tolerance(dtype)


@on_gpus
@in_types
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_query_has_the_same_bits_in_every_kernel(
    device, dtype, cache_dtype, heads, kv_heads, head_dim, block_size
):
    length = 6 * TILE + 57
    case = Case(length, heads, kv_heads, head_dim, block_size, device, dtype, cache_dtype)
    whole = case.prefill(0, length)
    for begin, end in ((0, 1), (0, 100), (100, 400), (399, 401), (2 * TILE, length), (length - 1, length)):
        assert torch.equal(case.prefill(begin, end), whole[begin:end])
    assert torch.equal(case.decode([*range(length)]), whole)  # so many that none is split
    few = [5, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, length - 1]
    assert torch.equal(case.decode(few), whole[few])
    for position in few:
        assert torch.equal(case.decode([position]), whole[[position]])
    for end in (TILE, 2 * TILE, 3 * TILE, 6 * TILE):
        sharing = [*range(end, length, 7), length - 1]
        for common in (end, end + 48):
            plan = case.plan(end, common, len(sharing), heads // kv_heads)
            assert torch.equal(case.decode(sharing, plan), whole[sharing])


@on_gpus
def test_without_one_order_of_tiles_bits_differ(device, monkeypatch):
    case = Case(6 * TILE + 57, 16, 8, 128, 16, device, HALF)
    queries = [*range(4 * TILE, case.length)]
    before = case.decode(queries)
    monkeypatch.setattr(attention, "TILE", TILE // 2)
    assert not torch.equal(case.decode(queries), before)


@on_devices
@pytest.mark.parametrize("shape", [(96, 80), (64, 512), (208, 256)], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_and_its_activation(device, shape, rows, has_bias):
    dtype = on(device, HALF, torch.float32)
    # Multiples of 1/4, whose sums are exact in any order: the interpreter has the processor's.
    sizes = (rows, shape[1]), shape, shape[:1]
    x, weight, bias = (torch.randint(-4, 5, size, device=device).to(dtype) / 4 for size in sizes)
    if not has_bias:
        bias = None
    y = multiply(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert error(y, exact) < tolerance(dtype)
    assert torch.equal(multiply(x, weight, bias, gated=True), silu_and_mul(y))


ON_A_DESKTOP = """
from nanovllm.extensions.exact.kernels.product import multiply
for rows in (1, 17, 50, 100, 300):
    for outputs in (1024, 16384):
        x, weight = (torch.empty(size, 512, dtype=torch.bfloat16) for size in (rows, outputs))
        multiply(x, weight)
"""


@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="compiles with Triton")
def test_products_fit_into_the_shared_memory_of_a_desktop_gpu():
    shared = shared_memory_of(ON_A_DESKTOP)
    assert len(shared) == 10 and max(shared) <= SHARED_MEMORY


@on_gpus
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(4096, 1024), (1024, 3072), (4096, 4096), (4096, 12288), (128, 2048), (576, 1536)], ids=str
)
def test_a_product_has_the_same_bits_for_every_number_of_rows(device, dtype, shape):
    x = rand(700, shape[1], device=device, dtype=dtype)
    weight, bias = (rand(*size, device=device, dtype=dtype) for size in (shape, shape[:1]))
    expected = multiply(x, weight, bias)
    assert error(expected, F.linear(x.double(), weight.double(), bias.double())) < tolerance(dtype)
    for rows in [*range(1, 70), *range(70, 513, 13), 512, 513, 700]:
        assert torch.equal(product(x[:rows], weight, bias), expected[:rows]), rows
        assert torch.equal(multiply(x[-rows:], weight, bias), expected[-rows:]), rows
        if rows % 5 == 0 and few_rows(rows, weight):
            gated = multiply(x[:rows], weight, bias, gated=True)
            assert torch.equal(gated, silu_and_mul(expected[:rows])), rows


@on_gpus
def test_a_library_that_splits_a_sum_is_not_used(device):
    """cuBLAS does for these few rows and so many inputs, and not for more rows."""
    shape, dtype, device = torch.Size((4096, 12288)), torch.bfloat16, torch.device("cuda", 0)
    found = {rows: library_agrees(rows, shape, dtype, device) for rows in (72, 96, 160, 512, 2048)}
    assert not all(found.values()) and found[512] and found[2048], found


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_parts_are_added_up_in_order(device, dtype):
    parts = rand(on(device, 300, 5), 8, on(device, 2048, 40), device=device, dtype=dtype)
    expected = parts[:, 0].float()
    for part in range(1, 8):
        expected = expected + parts[:, part].float()
    assert torch.equal(sum_in_order(parts), expected.to(dtype))
