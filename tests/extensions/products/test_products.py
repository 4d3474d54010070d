"""Which products a layer lists, and which of them it is given for a step's rows."""

from types import SimpleNamespace

import pytest
import torch

from nanovllm.distributed.group import Group, use_group
from nanovllm.extensions.exact.kernels import product as exact_product
from nanovllm.extensions.exact.products import ExactHead, FewRows, FewRowsHead, dense_weight, use_heads
from nanovllm.extensions.products import products
from nanovllm.extensions.products.products import FoldingWeight, FusedGemm, Gemv
from nanovllm.kernels import runtime
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import ColumnParallelLinear, LinearBase, ReplicatedLinear, RowParallelLinear
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.torch_defaults import torch_defaults

CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch):
    """As in a process that compiles for such a GPU."""
    properties = SimpleNamespace(major=9, minor=0, shared_memory_per_multiprocessor=233472)
    monkeypatch.setattr(runtime, "compiling_for", properties)
    monkeypatch.setattr(runtime, "TRITON_DEVICES", {"cpu"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def make(kind: type[LinearBase], sizes=(512, 1024), dtype=torch.bfloat16, num_ranks=1) -> LinearBase:
    with torch_defaults(dtype, CPU), use_group(Group(0, num_ranks)):
        layer = kind(*sizes)
        layer.set_matrix(FoldingWeight(layer.shards))
    return layer


def listed(*args, **options) -> list[type]:
    layer = make(*args, **options)
    return [type(product) for product in (*layer.products, layer.matrix)]


@pytest.mark.skipif(not runtime.HAVE_TRITON, reason="needs Triton")
@pytest.mark.usefixtures("hopper")
def test_what_folds_a_residual_in_is_listed_only_beside_a_narrow_one_on_one_rank():
    everything = [Gemv, FusedGemm, FusedGemm, FoldingWeight]
    assert listed(ColumnParallelLinear) == listed(RowParallelLinear) == everything
    assert listed(ColumnParallelLinear, (512, 4096)) == listed(RowParallelLinear, (3072, 512)) == everything
    for others in (
        listed(ReplicatedLinear),
        listed(ColumnParallelLinear, num_ranks=2),
        listed(RowParallelLinear, num_ranks=2),
        listed(ColumnParallelLinear, (2048, 512)),
        listed(RowParallelLinear, (512, 2048)),
        listed(RowParallelLinear, dtype=torch.float16),
    ):
        assert others == [Gemv, FoldingWeight]
    assert listed(ColumnParallelLinear, dtype=torch.float32) == [FoldingWeight]


@pytest.mark.skipif(not runtime.HAVE_TRITON, reason="needs Triton")
@pytest.mark.usefixtures("hopper")
def test_the_plain_product_of_few_rows_and_outputs_is_small_gemm(monkeypatch):
    monkeypatch.setattr(products, "small_gemm", lambda x, weight, bias: ("small_gemm",))

    def multiplied(rows=8, sizes=(3072, 256), dtype=torch.bfloat16) -> bool:
        router = make(ReplicatedLinear, sizes, dtype)
        return router.matrix.multiply(torch.empty(rows, sizes[0], dtype=dtype)) == "small_gemm"

    assert multiplied() and multiplied(1)
    others = [dict(rows=9), dict(rows=0), dict(sizes=(3080, 256)), dict(sizes=(3072, 257))]
    others += [dict(sizes=(3068, 256)), dict(dtype=torch.float16), dict(dtype=torch.float32)]
    assert not any(multiplied(**other) for other in others)


@pytest.mark.skipif(not runtime.HAVE_TRITON, reason="needs Triton")
@pytest.mark.usefixtures("hopper")
def test_few_rows_that_nothing_folds_are_multiplied_by_the_exact_product(monkeypatch):
    monkeypatch.setitem(globals(), "FoldingWeight", dense_weight(False, FoldingWeight))
    assert listed(ColumnParallelLinear)[:-1] == [Gemv, FusedGemm, FusedGemm, FewRows]
    wide = make(ColumnParallelLinear, (4096, 12288))
    assert [type(product) for product in wide.products] == [Gemv, FewRows]
    *_, few = wide.products
    assert few.accepts(3, False) and few.accepts(64, False)
    assert not few.accepts(65, False) and not few.accepts(3, True)
    monkeypatch.setattr(runtime.gpu_properties(CPU), "shared_memory_per_multiprocessor", 102400)
    assert listed(ColumnParallelLinear)[:-1] == [Gemv]


def make_head(dtype=torch.bfloat16, are_exact=False) -> ParallelLMHead:
    with torch_defaults(dtype, CPU):
        head = ParallelLMHead(40, 16)
    use_heads(head, are_exact)
    return head


@pytest.mark.skipif(not runtime.HAVE_TRITON, reason="needs Triton")
@pytest.mark.usefixtures("hopper")
def test_a_head_multiplies_few_rows_by_the_exact_product(monkeypatch):
    head = make_head()
    monkeypatch.setattr(exact_product, "multiply", lambda x, weight, bias: (len(x), weight.shape))
    assert type(head) is FewRowsHead and head.logits(torch.zeros(256, 16)) == (256, (40, 16))
    assert head.logits(torch.zeros(257, 16).bfloat16()).shape == (257, 40)  # by the library
    assert type(make_head(are_exact=True)) is ExactHead
    assert type(make_head(torch.float32)) is ParallelLMHead
    monkeypatch.setattr(runtime.gpu_properties(CPU), "shared_memory_per_multiprocessor", 102400)
    assert type(make_head()) is ParallelLMHead


def test_on_a_cpu_there_is_the_library_alone():
    assert listed(ColumnParallelLinear) == listed(RowParallelLinear) == [FoldingWeight]


@pytest.mark.skipif(not runtime.HAVE_TRITON, reason="needs Triton")
@pytest.mark.usefixtures("hopper")
def test_a_prefill_is_the_librarys_and_a_decode_step_whose_product_comes_first():
    layer = make(ColumnParallelLinear)

    def given(rows: int, is_prefill: bool, layer: LinearBase = layer) -> str:
        set_context(is_prefill)
        try:
            product = layer.product(rows)
        finally:
            reset_context()
        return product.multiply.func.__name__ if isinstance(product, (Gemv, FusedGemm)) else "library"

    few = ["gemv", "small_gemm", "small_gemm", "fused_linear", "fused_linear", "library"]
    assert [given(rows, False) for rows in (1, 2, 8, 9, 256, 257)] == few
    assert {given(rows, True) for rows in (1, 3, 257)} == {"library"}
    long = make(RowParallelLinear, (3080, 512))
    assert [given(rows, False, long) for rows in (2, 3)] == ["gemv", "fused_linear"]
