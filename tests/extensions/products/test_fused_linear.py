"""The fused matrix products against their torch twins and against plain arithmetic in double precision.

As in test_kernels.py, the Triton kernel runs through Triton's interpreter in a child process, and on a GPU.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from extension_kernels import fused_linear_torch
from kernel_checks import error, rand, tolerance

from nanovllm.extensions.products.kernels import fused_linear
from nanovllm.extensions.products.kernels.small_gemm import MAX_SMALL_ROWS, small_gemm
from nanovllm.kernels.layernorm import rms_norm_torch
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = pytest.param("cuda", torch.bfloat16, marks=[pytest.mark.gpu, needs_cuda], id="gpu")
CPU = pytest.param("cpu", torch.float32, id="float32"), pytest.param("cpu", torch.float16, id="half")
on_devices = pytest.mark.parametrize("device, dtype", [*CPU, GPU] if INTERPRETED else [GPU])
EPS = 1e-5


@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
@pytest.mark.slow
def test_the_kernel_agrees_with_its_twins_in_tritons_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
        __file__,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]


def half_normalised(rows, hidden, device, dtype):
    """x, x * the norm's weight, x's squares in several parts as linear_add leaves them, and the weight."""
    x, norm_weight = rand(rows, hidden, device=device, dtype=dtype) * 3, 1 + rand(hidden, device=device) / 4
    squares = F.pad(x.float().square(), (0, -hidden % 16)).unflatten(1, (-1, 16)).sum(-1)
    return x, x * norm_weight.to(dtype), squares, norm_weight.to(dtype)


def plain_norm_linear(x, norm_weight, weight, bias, gated):
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y


def linear_add(x, weight, bias, residual, norm_weight, multiply=fused_linear.fused_linear):
    return multiply(x, weight, bias, residual=residual, next_norm_weight=norm_weight)


def kernels_for(rows):
    return [fused_linear.fused_linear, small_gemm][: 1 + (rows <= MAX_SMALL_ROWS)]


def check_norm_linear(rows, hidden, width, device, dtype):
    x, scaled, squares, norm_weight = half_normalised(rows, hidden, device, dtype)
    for gated in (False, True):
        weight = (rand(width * (1 + gated), hidden, device=device) * hidden**-0.5).to(dtype)
        biases = None, rand(len(weight), device=device, dtype=dtype)
        for bias, multiply in itertools.product(biases, kernels_for(rows)):
            got = multiply(scaled, weight, bias, squares, EPS, gated)[0]
            expected = plain_norm_linear(x, norm_weight, weight, bias, gated)
            assert got.shape == (rows, width) and got.dtype == dtype
            assert error(got, expected) < tolerance(dtype)


def check_linear_add(rows, in_features, hidden, device, dtype):
    # A slice of something wider, as the attention's output may be, and nothing but NaN around it.
    around = torch.full((rows + 3, in_features + 32), float("nan"), device=device, dtype=dtype)
    x = around[1 : rows + 1, 16 : in_features + 16]
    x.copy_(rand(rows, in_features, device=device))
    weight = (rand(hidden, in_features, device=device) * in_features**-0.5).to(dtype)
    residual, norm_weight = (
        rand(*shape, device=device, dtype=dtype) for shape in ((rows, hidden), (hidden,))
    )
    biases = None, rand(hidden, device=device, dtype=dtype)
    for bias, multiply in itertools.product(biases, kernels_for(rows)):
        total, scaled, squares = linear_add(x, weight, bias, residual, norm_weight, multiply)
        expected = x.double() @ weight.double().T + residual.double()
        if bias is not None:
            expected = expected + bias.double()
        assert total.dtype == scaled.dtype == dtype and squares.dtype == torch.float32
        assert total.shape == scaled.shape == (rows, hidden)
        assert error(total, expected) < tolerance(dtype)
        assert error(scaled, total.double() * norm_weight.double()) < tolerance(dtype)
        # Of the rounded sum, as a norm of it would see them.
        assert error(squares.sum(-1), total.double().square().sum(-1)) < 1e-5


SHAPES = [(64, 48), (72, 40), (600, 136)]


@pytest.mark.parametrize("in_features, width", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twins_do_plain_arithmetic(monkeypatch, dtype, in_features, width):
    monkeypatch.setitem(globals(), "kernels_for", lambda rows: [fused_linear_torch])
    check_norm_linear(7, in_features, width, "cpu", dtype)
    check_linear_add(7, in_features, width, "cpu", dtype)


def row_counts(device):
    return [1, 7, 8, 64, 65, 128, 200, 256] if device == "cuda" else [1, 7, 70]


@on_devices
@pytest.mark.parametrize("in_features, width", [*SHAPES, (1024, 3072)])
def test_a_norm_and_a_product_in_one(device, dtype, in_features, width):
    if device == "cpu" and in_features == 1024:
        pytest.skip("takes long in the interpreter")
    for rows in row_counts(device):
        check_norm_linear(rows, in_features, width, device, dtype)


@on_devices
@pytest.mark.parametrize("in_features, width", [*SHAPES, (3072, 1024)])
def test_a_product_and_a_residual_in_one(device, dtype, in_features, width):
    if device == "cpu" and in_features == 3072:
        pytest.skip("takes long in the interpreter")
    for rows in row_counts(device):
        check_linear_add(rows, in_features, width, device, dtype)


@on_devices
def test_every_tile_of_the_table_is_right(device, dtype, monkeypatch):
    for kind, tiles in fused_linear.TILES.items():
        for most, tile in zip((64, 128, 256), tiles, strict=True):
            monkeypatch.setattr(fused_linear, "_tile", lambda *_, tile=tile: tile)
            rows = most - 5 if device == "cuda" else min(most, tile[0] + 1)
            if kind == "gated":
                check_norm_linear(rows, 264, 72, device, dtype)
            else:
                check_linear_add(rows, 264, 72, device, dtype)


@on_devices
def test_what_is_normalised_already_is_only_multiplied(device, dtype):
    x, norm_weight = rand(5, 96, device=device, dtype=dtype), rand(96, device=device, dtype=dtype)
    weight = rand(32, 96, device=device, dtype=dtype)
    got = fused_linear.fused_linear(rms_norm_torch(x, norm_weight, EPS), weight, None)[0]
    assert error(got, plain_norm_linear(x, norm_weight, weight, None, False)) < tolerance(dtype)


@on_devices
def test_no_rows_give_no_rows(device, dtype):
    x, weight = rand(0, 64, device=device, dtype=dtype), rand(32, 64, device=device, dtype=dtype)
    residual = rand(0, 32, device=device, dtype=dtype)
    assert linear_add(x, weight, None, residual, weight[:, 0])[0].shape == (0, 32)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rows", [5, 100])
def test_a_captured_layer_gives_the_same_bits_every_time(rows):
    """Kernels overlap at their ends: a missing wait would show as results that change."""
    hidden, dtype = 1024, torch.bfloat16
    multiply = kernels_for(rows)[-1]
    weights = [
        (rand(out, into, device="cuda") * into**-0.5).to(dtype)
        for out, into in ((4096, hidden), (hidden, 4096), (6144, hidden), (hidden, 3072))
    ]
    norm_weight, x = (
        torch.ones(hidden, device="cuda", dtype=dtype),
        rand(rows, hidden, device="cuda", dtype=dtype),
    )

    def layers(count):
        total, scaled, squares = x, rms_norm_torch(x, norm_weight, EPS), None
        for _ in range(count):
            for into, out, gated in ((0, 1, False), (2, 3, True)):
                wide = multiply(scaled, weights[into], None, squares, EPS, gated)[0]
                total, scaled, squares = linear_add(wide, weights[out], None, total, norm_weight, multiply)
            torch.cuda.synchronize() if not torch.cuda.is_current_stream_capturing() else None
        return total

    expected = layers(6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(6)
    for _ in range(30):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
