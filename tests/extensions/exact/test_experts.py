"""Experts, weights in fp8 and 8-bit pages in exact mode: a row's bits do not depend on what is beside it."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cases import slow
from exact_schedules import compare
from kernel_checks import HALF, assert_passes_in_the_interpreter

from nanovllm import LLM
from nanovllm.assembly import build_model
from nanovllm.extensions.exact import exact_parts
from nanovllm.extensions.exact.kernels.ordered_sum import sum_in_order
from nanovllm.extensions.experts import moe
from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.int8_cache.layout import Int8Layout
from nanovllm.extensions.quantised.assignment import set_weight
from nanovllm.extensions.quantised.fp8 import Fp8
from nanovllm.extensions.quantised.scaled import FLOATS
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.torch_defaults import torch_defaults
from tiny_checkpoints import edit_json, make_checkpoint, make_config, one_thread, read_config  # noqa: F401

SIZES = {
    "small": {},
    "uneven": dict(
        hidden_size=60, head_dim=16, num_experts=5, moe_intermediate_size=20, norm_topk_prob=False
    ),
    "one long": dict(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=1000),
    "real": dict(
        hidden_size=2048,
        num_hidden_layers=1,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        head_dim=128,
    ),
    "wide": dict(hidden_size=1536, num_hidden_layers=1, num_experts=16, head_dim=16, vocab_size=64),
}
CPU = torch.device("cpu")
by_torch = pytest.mark.skipif(INTERPRETED, reason="what the references compute")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
def test_the_kernel_has_the_bits_of_its_reference_in_tritons_interpreter():
    assert_passes_in_the_interpreter(__file__)


@pytest.fixture(autouse=True)
def without_context():
    yield
    reset_context()


def make_layer(
    size: str, dtype: torch.dtype, exact: bool = True, device: torch.device = CPU, quantization=None
) -> MixtureOfExperts:
    config = read_config(make_config("qwen3_moe", **SIZES[size]))
    with torch_defaults(dtype, device):
        layer = build_model(config, quantization, exact).model.layers[0].mlp
    for part in layer.modules():
        if isinstance(matrix := getattr(part, "matrix", None), Fp8):
            matrix.fill(torch.randn(matrix.shape, device=device))
            part.finish()
        elif matrix is not None:
            matrix.weight.data.normal_(0, 0.15)
    return layer


def compute(layer: MixtureOfExperts, x: torch.Tensor, is_prefill: bool) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x.shape[1]
    norms = [RMSNorm(hidden).to(x) for _ in range(2)]
    set_context(is_prefill)
    stream = layer(Stream(x, norms[0], norms[0](x)), norms[1])
    return stream.residual(), stream.normalised()


# Experts


@by_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [size for size in SIZES if size != "real"])
def test_a_row_alone_has_the_bits_that_it_has_among_others(size, dtype):
    layer = make_layer(size, dtype)
    x = torch.randn(70, layer.experts.down_proj.shards["0.down_proj"].size[0], dtype=dtype)
    whole = compute(layer, x, True)
    for rows in (slice(0, 1), slice(3, 5), slice(69, 70), slice(1, 4), slice(20, 37)):
        for is_prefill in (True, False):
            for some, all_rows in zip(compute(layer, x[rows].clone(), is_prefill), whole, strict=True):
                assert torch.equal(some, all_rows[rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, quantization",
    [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, "fp8")],
    ids=str,
)
def test_on_a_gpu_all_tiles_of_the_grouped_products_give_a_row_the_same_bits(dtype, quantization):
    device = torch.device("cuda")
    layer = make_layer("real", dtype, device=device, quantization=quantization)
    x = torch.randn(3000, 2048, device=device).to(dtype)
    whole = compute(layer, x, True)
    for count in (*range(1, 34), 64, 100, 128, 129, 200, 256, 257, 400, 512, 1000, 2000):
        for is_prefill in (True, False):
            for some, all_rows in zip(compute(layer, x[-count:].clone(), is_prefill), whole, strict=True):
                assert torch.equal(some, all_rows[-count:]), (count, is_prefill)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 2048), (2048, 6144), (24576, 4096), (4096, 12288)], ids=str)
def test_on_a_gpu_fp8_products_give_a_row_the_same_bits_among_any_number(shape):
    device = torch.device("cuda")
    with torch_defaults(torch.bfloat16, device):
        layer = torch.nn.ModuleList([RowParallelLinear(shape[1], shape[0])])
        set_weight(layer[0], Fp8(layer[0].shards, (1, 0), FLOATS))
    exact_parts.use_exact(layer, moe, Fp8)
    layer[0].matrix.fill(torch.randn(shape, device=device))
    layer[0].finish()
    product = layer[0].product(1)
    x = torch.randn(2000, shape[1], device=device).bfloat16()
    whole = product.linear(x, None)
    for count in (*range(1, 520), 1000, 1999):
        assert torch.equal(product.linear(x[-count:], None), whole[-count:]), count


@by_torch
def test_nor_do_they_depend_on_where_threads_share_the_rows():
    layer = make_layer("one long", torch.float32)
    x = torch.randn(35, 64)
    torch.set_num_threads(2)
    try:
        whole, _ = compute(layer, x, True)
        alone = torch.cat([compute(layer, row, False)[0] for row in x.split(1)])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, whole)


@by_torch
def test_without_the_mode_it_has_other_bits():
    layer = make_layer("small", torch.float32, exact=False)
    x = torch.randn(70, 64)
    whole, _ = compute(layer, x, True)
    alone = torch.cat([compute(layer, row, False)[0] for row in x.split(1)])
    assert not torch.equal(alone, whole)


@pytest.mark.parametrize("rows", [1, 300])
def test_any_number_of_rows_is_multiplied_by_what_a_prefill_takes_and_the_sum_is_rounded_once(rows):
    layer = make_layer("small", torch.bfloat16)
    asked = []
    parts = torch.randn(rows, 3, 64).bfloat16()

    def choose_kernels(x, weights, is_prefill):
        asked.append(is_prefill)

    module = SimpleNamespace(
        MixtureOfExperts=MixtureOfExperts, choose_kernels=choose_kernels, run_grouped=lambda *_: parts
    )
    exact_parts.use_exact(layer, module, Fp8)
    x = torch.randn(rows, 64).bfloat16()
    residual, _ = compute(layer, x, False)
    assert asked == [True]
    added = (parts[:, 0].float() + parts[:, 1].float() + parts[:, 2].float()).bfloat16()
    assert torch.equal(residual, x + added)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("count, width", [(1, 20), (3, 60), (8, 2048)])
def test_parts_are_added_up_in_their_order_and_rounded_once(count, width, dtype, device):
    parts = torch.randn(7, count, width).mul(torch.logspace(0, 3, count)[:, None]).to(device, dtype)
    expected = parts[:, 0].float()
    for part in range(1, count):
        expected = expected + parts[:, part].float()
    assert torch.equal(sum_in_order(parts), expected.to(dtype))
    assert torch.equal(sum_in_order(parts[2:3].clone()), expected[2:3].to(dtype))
    if count == 8 and dtype == torch.float32:
        assert not torch.equal(sum_in_order(parts.flip(1)), expected)


def test_there_may_be_no_rows_to_add_up():
    assert sum_in_order(torch.empty(0, 3, 64)).shape == (0, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe", seed=5))


@pytest.mark.usefixtures("no_forecast")
@by_torch
@pytest.mark.parametrize(
    "options",
    [
        dict(dtype="float32"),
        slow(dict(dtype="bfloat16")),
        slow(dict(dtype="bfloat16", kv_cache_dtype="int8")),
        slow(dict(dtype="float32", quantization="fp8")),
        dict(dtype="bfloat16", quantization="fp8", kv_cache_dtype="int8"),
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_a_sequence_in_any_company_has_the_logits_of_the_sequence_alone(checkpoint, options):
    counts, different = compare(checkpoint, 3, 1, 12, device="cpu", exact=True, **options)
    assert counts["completions"] > 30 and not different, f"{len(different)}, first {different[0]}"


@pytest.mark.usefixtures("no_forecast")
@by_torch
@pytest.mark.parametrize("options", [{}, dict(quantization="fp8")], ids=str)
def test_without_the_mode_the_same_schedules_change_logits(checkpoint, options):
    counts, different = compare(checkpoint, 2, 1, 12, device="cpu", dtype="float32", **options)
    assert len(different) > counts["completions"] / 4


# Weights in 8-bit floating point


def make_fp8(model_type: str, dtype: torch.dtype, exact: bool = True) -> torch.nn.Module:
    config = read_config(make_config(model_type, attention_bias=True))
    with torch_defaults(dtype, CPU):
        model = build_model(config, quantization="fp8", exact=exact)
    for layer in model.modules():
        if isinstance(matrix := getattr(layer, "matrix", None), Fp8):
            matrix.fill(torch.randn(matrix.shape))
            layer.finish()
    return model


@by_torch
def test_fp8_weights_multiply_a_row_as_if_it_were_alone():
    for exact in (True, False):
        layer = make_fp8("qwen3", torch.float32, exact).model.layers[0].mlp
        x, norm = torch.randn(40, 64), RMSNorm(64)
        whole = layer(Stream(x, norm), norm).residual()
        alone = torch.cat([layer(Stream(row, norm), norm).residual() for row in x.split(1)])
        assert torch.equal(alone, whole) is exact


@by_torch
def test_what_fp8_products_fold_in_on_a_gpu_is_left_to_kernels_of_its_own(monkeypatch):
    """
    A product gets rows that are normalised, or activated, and rounded. It is the last one, which multiplies
    any number of rows.
    """
    multiplied = []

    class OfFewRows:
        def linear(self, x, bias, gated=False):
            raise AssertionError("more rows would be added up in another order")

    class Folding:
        def linear(self, x, bias, gated=False):
            assert not gated
            multiplied.append(x)
            return x.repeat(1, 2)

    monkeypatch.setattr(Fp8, "products", lambda weight, layer: [OfFewRows(), Folding()])
    product = make_fp8("qwen3", torch.float32).model.layers[0].mlp.gate_up_proj.product(1)
    x, norm = torch.randn(3, 64), RMSNorm(64)
    gated = product.norm_linear(Stream(x, norm), None, gated=True)
    assert torch.equal(multiplied[0], norm(x))
    assert torch.equal(gated, F.silu(norm(x)) * norm(x))
    stream = product.linear_add(Stream(x.repeat(1, 2), norm), x, None, RMSNorm(128))
    assert type(stream) is Stream and torch.equal(stream.x, x.repeat(1, 2) * 2)


@by_torch
def test_no_gemv_multiplies_fp8_weights_in_exact_mode():
    for exact in (True, False):
        config = read_config(make_config("qwen3"))
        with torch_defaults(torch.bfloat16, CPU):
            model = build_model(config, quantization="fp8", exact=exact)
        weight = model.model.layers[0].mlp.down_proj.matrix
        assert (weight.make_gemv is None) is exact


@by_torch
def test_fp8_weights_with_scales_for_blocks_are_refused(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises(
        ValueError, match=r"exact=True needs fp8 weights with a scale for each row: .* has blocks"
    ):
        LLM(str(folder), device="cpu", dtype="bfloat16", exact=True)


# 8-bit pages


@by_torch
def test_a_token_is_stored_in_8_bits_as_if_it_were_alone():
    x = torch.randn(9, 1, 64)  # of one head, whose rotation is a product of 2 rows
    layout = exact_parts.exact_layout(Int8Layout())
    whole = layout.rotate(x, x)
    alone = [layout.rotate(row, row) for row in x.split(1)]
    for i, each in enumerate(whole):
        assert torch.equal(each, torch.cat([pair[i] for pair in alone]))
        torch.testing.assert_close(each, Int8Layout().rotate(x, x)[i])


def test_decode_steps_and_prefills_store_8_bits_by_the_same_kernel():
    cache = torch.empty(2, *Int8Layout().page_shape(16, 1, 64), dtype=torch.uint8)
    layout = exact_parts.exact_layout(Int8Layout())
    assert layout.store_hooks(cache, 64, True) == layout.store_hooks(cache, 64, False)
    assert Int8Layout().store_hooks(cache, 64, True) != Int8Layout().store_hooks(cache, 64, False)
