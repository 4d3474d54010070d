"""Layers that multiply in 8 bits pass activations on as codes, and products without their scales.

That takes a GPU; here the library's product is replaced by one in float32.
"""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.quantization import fp8
from nanovllm.layers.quantization.fp8 import Fp8
from nanovllm.layers.residual_stream import Stream

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
    monkeypatch.setattr(fp8, "can_use_fp8", lambda x, weight: True)
    return found


def make(layer: LinearBase, tile: tuple[int, int] | None) -> LinearBase:
    if tile is not None:
        layer.set_format(Fp8(layer.parts, tile, "floats"))
    matrix = torch.randn(layer.format.shape) / layer.format.shape[1] ** 0.5
    layer.format.fill(matrix) if tile else layer.weight.data.copy_(matrix)
    if layer.bias is not None:
        layer.bias.data.normal_()
    return layer


def matrix_of(layer: LinearBase) -> torch.Tensor:
    return layer.weight if layer.is_plain else layer.format.dequantise(slice(0, layer.format.shape[0]))


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
    norms = [RMSNorm(HIDDEN) for _ in range(3)]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5)
    up = make(MergedColumnParallelLinear(HIDDEN, [WIDTH, WIDTH], bias), gates)
    down = make(RowParallelLinear(WIDTH, HIDDEN, bias), down)
    x = torch.randn(5, HIDDEN)
    stream = Stream(x, norms[0])
    for norm, next_norm in zip(norms, norms[1:], strict=False):
        stream = down.add_to(stream, up(stream, silu_and_mul=True), next_norm)
        gate, value = F.linear(norm(x), matrix_of(up), up.bias).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * value, matrix_of(down), down.bias)
    normed = stream.normalised()
    assert products == expected
    for found, wanted in ((normed, norms[2](x)), (stream.x, x)):
        assert (found - wanted).norm() < 0.04 * wanted.norm()


def test_what_is_added_to_a_stream_is_added_once():
    x, added, norm = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN), RMSNorm(HIDDEN)
    stream = Stream(x, norm, added=added)
    first, second = stream.quantised(0), stream.quantised(0)
    assert torch.equal(stream.x, x + added)
    assert torch.equal(first.codes[:3].float(), second.codes[:3].float())
    torch.testing.assert_close(stream.normalised(), norm(x + added))
