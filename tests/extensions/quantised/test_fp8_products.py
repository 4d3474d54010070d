"""Layers that multiply in 8 bits pass activations on as codes, and products without their scales.

That takes a GPU; here the library's product is replaced by one in float32.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from extension_kernels import fused_linear_torch, gemv_torch, linear_fp8_torch

from nanovllm.extensions.products.products import FoldingWeight, FusedGemm, Gemv
from nanovllm.extensions.quantised import products as products_module
from nanovllm.extensions.quantised.formats import read_scheme
from nanovllm.extensions.quantised.fp8 import Fp8
from nanovllm.extensions.quantised.kernels.quantised_weight import dequantise_torch
from nanovllm.extensions.quantised.products import (
    FewRowsFp8Product,
    Fp8Product,
    PendingAdd,
    quantised_rows,
)
from nanovllm.extensions.quantised.scaled import FLOATS
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.linear import (
    DenseWeight,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

HIDDEN, WIDTH = 256, 384
ROW, BLOCKS = (1, 0), (128, 128)


@pytest.fixture
def products(monkeypatch) -> list[str]:
    """What scales each product was given."""
    found = []

    def multiply(x, weight, scale_a, scale_b, out_dtype, use_fast_accum):
        x, weight = x.float(), weight.float()
        if scale_a.numel() == 1:
            found.append("none")
        elif scale_a.shape[1] == 1:
            found.append("rows")
        else:
            found.append("groups")
            scale_a = scale_a.repeat_interleave(128, 1)
            x, scale_a = x * scale_a, 1
            scale_b = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weight, scale_b = weight * scale_b, 1
        return ((x @ weight) * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(products_module, "can_use_fp8", lambda x, weight: True)
    monkeypatch.setattr(products_module, "linear_fp8", linear_fp8_torch)
    monkeypatch.setattr(products_module, "MAX_LINEAR_ROWS", 1)  # the rows of most tests are more
    return found


def make(layer: LinearBase, tile: tuple[int, int] | None) -> LinearBase:
    if tile is not None:
        layer.set_matrix(Fp8(layer.shards, tile, FLOATS))
    matrix = torch.randn(layer.matrix.shape) / layer.matrix.shape[1] ** 0.5
    layer.matrix.fill(matrix) if tile else layer.weight.data.copy_(matrix)
    if layer.bias is not None:
        layer.bias.data.normal_()
    return layer


def matrix_of(layer: LinearBase) -> torch.Tensor:
    return (
        layer.weight
        if isinstance(layer.matrix, DenseWeight)
        else dequantise_torch(layer.matrix.quantised, slice(0, layer.matrix.shape[0]), torch.float32)
    )


def check_two_layers(up: LinearBase, down: LinearBase) -> None:
    """A stream through two MLPs becomes what float32 computes, but for rounding to 8 bits."""
    norms = [RMSNorm(HIDDEN) for _ in range(3)]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(2, HIDDEN)
    stream = Stream(x, norms[0])
    for norm, next_norm in zip(norms, norms[1:], strict=False):
        stream = down.add_to(stream, up(stream, silu_and_mul=True), next_norm)
        gate, value = F.linear(norm(x), matrix_of(up), up.bias).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * value, matrix_of(down), down.bias)
    for found, wanted in ((stream.normalised(), norms[2](x)), (stream.residual(), x)):
        assert (found - wanted).norm() < 0.04 * wanted.norm()


@pytest.mark.parametrize(
    "gates, down, bias, expected",
    [
        (ROW, ROW, False, ["none"] * 4),
        (ROW, ROW, True, ["rows"] * 4),
        (BLOCKS, BLOCKS, False, ["groups"] * 4),
        (ROW, BLOCKS, True, ["rows", "groups"] * 2),
        (ROW, None, False, ["none"] * 2),
        (None, ROW, False, ["none"] * 2),
    ],
)
def test_what_8_bits_multiply_differs_by_the_rounding_of_activations(gates, down, bias, expected, products):
    torch.manual_seed(0)
    up = make(MergedColumnParallelLinear(HIDDEN, [WIDTH, WIDTH], bias), gates)
    down = make(RowParallelLinear(WIDTH, HIDDEN, bias), down)
    check_two_layers(up, down)
    assert products == expected


def test_our_own_kernel_multiplies_a_few_rows_of_decode_steps():
    product = FewRowsFp8Product(make(QKVParallelLinear(HIDDEN, 64, 4, 2), ROW).matrix.quantised)
    most = products_module.MAX_LINEAR_ROWS
    assert product.accepts(1, False) and product.accepts(most, False)
    assert not any(product.accepts(*each) for each in [(0, False), (most + 1, False), (1, True)])


def test_what_is_added_to_a_stream_is_added_once():
    x, added, norm = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN), RMSNorm(HIDDEN)
    stream = PendingAdd(x, norm, pending_add=added)
    first, second = quantised_rows(stream, 0), quantised_rows(stream, 0)
    assert torch.equal(stream.residual(), x + added)
    assert torch.equal(first.codes[:3].float(), second.codes[:3].float())
    torch.testing.assert_close(stream.normalised(), norm(x + added))


def make_product(layer: LinearBase, kind: str) -> None:
    """Give the layer a weight, and only one product that can multiply by it."""
    if kind == "8 bits":
        make(layer, ROW)
    elif kind == "8 bits, few rows":
        layer.products = [FewRowsFp8Product(make(layer, ROW).matrix.quantised)]
        layer.products[0].accepts = lambda rows, is_prefill: True
    else:
        layer.set_matrix(FoldingWeight(layer.shards))
        make(layer, None)
        if kind != "library":
            layer.products = [
                Gemv(functools.partial(gemv_torch, weight=layer.matrix.weight))
                if kind == "gemv"
                else FusedGemm(layer.matrix, fused_linear_torch, 256)
            ]


KINDS = ["library", "gemv", "fused", "8 bits", "8 bits, few rows"]


@pytest.mark.parametrize("into", KINDS)
@pytest.mark.parametrize("out", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_each_product_takes_what_any_other_leaves_half_done(into, out, bias, products):
    """As in a checkpoint some of whose layers are not quantised."""
    torch.manual_seed(0)
    up, down = (
        MergedColumnParallelLinear(HIDDEN, [WIDTH, WIDTH], bias),
        RowParallelLinear(WIDTH, HIDDEN, bias),
    )
    make_product(up, into)
    make_product(down, out)
    check_two_layers(up, down)


def test_layers_that_are_not_quantised_have_the_products_of_dense_weights(products):
    config = {"quant_method": "fp8", "fmt": "e4m3", "ignored_layers": ["down_proj"]}
    scheme = read_scheme(config, None)
    kinds = {}
    for name, layer in (
        ("qkv_proj", QKVParallelLinear(HIDDEN, 64, 4, 2)),
        ("down_proj", RowParallelLinear(WIDTH, HIDDEN)),
    ):
        layer.set_matrix(scheme.make_weight(FoldingWeight, layer, name, [f"model.layers.0.{name}"]))
        kinds[name] = [type(product) for product in (*layer.products, layer.matrix)]
    assert kinds == {"qkv_proj": [FewRowsFp8Product, Fp8Product, Fp8], "down_proj": [FoldingWeight]}


@pytest.mark.parametrize("dense, expected", [(FoldingWeight, Gemv), (DenseWeight, None)])
def test_one_row_is_multiplied_as_by_a_dense_weight(dense, expected):
    layer = QKVParallelLinear(HIDDEN, 64, 4, 2)
    for scheme in read_scheme({"quant_method": "fp8", "fmt": "e4m3"}, None), read_scheme(None, "int4"):
        assert scheme.make_weight(dense, layer, "qkv_proj", ["layers.0.q_proj"]).make_gemv is expected


def test_a_product_without_gates_is_complete(products):
    layer, x, norm = make(QKVParallelLinear(HIDDEN, 64, 4, 2), ROW), torch.randn(3, HIDDEN), RMSNorm(HIDDEN)
    y, expected = layer(Stream(x, norm)), F.linear(norm(x), matrix_of(layer))
    assert products == ["rows"] and (y - expected).norm() < 0.04 * expected.norm()
