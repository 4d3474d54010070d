"""The products of quantised weights against plain arithmetic with the matrix that their codes stand for.

As in test_kernels.py, the Triton kernels run through Triton's interpreter in a child process, and on a GPU.
"""

import random
from types import SimpleNamespace

import ptx
import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import SHARED_MEMORY, run_compiled, shared_memory_of
from kernel_checks import assert_passes_in_the_interpreter, error
from quantised_weights import FORMATS, in_order, make_weight

from nanovllm.extensions.quantised.kernels import (
    fp8_linear,
    grouped_codes,
    grouped_fp8,
    grouped_gemm,
    grouped_int4,
    multiply_words,
    nf4,
    quantised_matvec,
    to_numbers,
)
from nanovllm.extensions.quantised.kernels.fp8_linear import QuantisedRows, Unscaled
from nanovllm.extensions.quantised.kernels.gpu import gpu_supports
from nanovllm.extensions.quantised.kernels.grouped_gemm import GroupedProduct, Tile
from nanovllm.extensions.quantised.kernels.permute_k import permute_k
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    FP4_TABLE,
    NF4_TABLE,
    NUMBERS_OF_CODES,
    QuantisedWeight,
    dequantise,
    dequantise_torch,
    pack,
    unpack,
)
from nanovllm.extensions.quantised.products import CodesProduct, Int4Product, PendingAdd, UnpackedInt4Product
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED, arrival_counters
from nanovllm.layers.layernorm import RMSNorm

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = pytest.param("cuda", torch.bfloat16, marks=[pytest.mark.gpu, needs_cuda], id="gpu")
CPU = pytest.param("cpu", torch.float32, id="cpu")
on_devices = pytest.mark.parametrize("device, dtype", [CPU, GPU] if INTERPRETED else [GPU])
EPS = 1e-5
of_every_format = pytest.mark.parametrize("name", FORMATS)
SHAPES = [(40, 352), (64, 256), (258, 640)]  # outputs, inputs: the first cut off tiles of 64 and 128


def skip_most_on_a_cpu(device: str, shape: tuple[int, int], rows: int = 0, usual: int = 0) -> None:
    if device == "cpu" and (shape != SHAPES[0] or rows != usual):
        pytest.skip("takes long in the interpreter")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
def test_the_kernels_agree_with_their_twins_in_tritons_interpreter():
    assert_passes_in_the_interpreter(__file__)


def multiply_by_codes(x: torch.Tensor, weight: QuantisedWeight, bias=None) -> torch.Tensor:
    return grouped_codes.linear_codes(permute_k(x, weight.codes_per_byte), weight, bias)


def matrix_of(weight: QuantisedWeight) -> torch.Tensor:
    return dequantise_torch(weight, slice(0, weight.shape[0]), torch.float64)


def test_halves_of_bytes_hold_the_codes_they_were_given():
    codes = torch.randint(16, (5, 70), dtype=torch.uint8)
    assert pack(codes).shape == (5, 48)  # of whole blocks of 32
    assert torch.equal(unpack(pack(codes))[:, :70], codes)
    assert pack(codes)[0, 3] == codes[0, 3] + 16 * codes[0, 19]


DTYPES = [torch.bfloat16, torch.float16]  # in the order in which instructions for both are kept


def numbers_of(asm: str, dtype: torch.dtype, count: int, codes: torch.Tensor) -> list[torch.Tensor]:
    """What instructions make of bytes, four at once: `count` tensors of as many numbers."""
    words = codes.view(torch.int32).long() & 0xFFFFFFFF
    found = [ptx.run(asm, 2 * count, [word]) for word in words.tolist()]
    pairs = torch.tensor(found).view(-1, count, 2).to(torch.int32)
    return [each.contiguous().view(dtype).flatten().double() for each in pairs.unbind(1)]


@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", DTYPES)
def test_instructions_turn_codes_into_the_numbers_that_they_stand_for(dtype):
    """Without a GPU, each instruction spelled out: products of codes are made of these."""
    which, codes = DTYPES.index(dtype), torch.arange(256, dtype=torch.uint8)
    low, high = codes.long() & 15, codes.long() >> 4
    finite = (codes & 127) < 127
    [found] = numbers_of(to_numbers.E4M3_TO_NUMBERS.value[which], dtype, 1, codes)
    assert torch.equal(found[finite], codes.view(torch.float8_e4m3fn)[finite].double())
    above = [128, 1024][which]
    for asm, half in ((to_numbers.LOW_HALVES, low), (to_numbers.HIGH_HALVES, high)):
        [found] = numbers_of(asm.value[which], dtype, 1, codes)
        assert torch.equal(found, above + half.double())
    e2m1 = torch.tensor(NUMBERS_OF_CODES[3], dtype=torch.float64)
    both = numbers_of(to_numbers.E2M1_TO_NUMBERS.value[which], dtype, 2, codes)
    for found, half in zip(both, (low, high), strict=True):
        assert torch.equal(found * 2.0 ** [126, 14][which], e2m1[half])
    for kind, table in ((NF4_TABLE, 0), (FP4_TABLE, 1)):
        asm = (nf4.TO_BF16, nf4.TO_F16)[which].value[table]
        numbers = torch.tensor(NUMBERS_OF_CODES[kind], dtype=torch.float64)
        for found, half in zip(numbers_of(asm, dtype, 2, codes), (low, high), strict=True):
            torch.testing.assert_close(found, numbers[half], rtol=[2e-2, 2e-3][which], atol=0)


@of_every_format
def test_the_matrix_is_codes_less_zeros_times_scales_plus_offsets(name):
    weight = make_weight(name, (40, 128), "cpu")
    rows, columns = torch.arange(40) // weight.tile[0], torch.arange(128) // weight.tile[1]
    grids = [each for each in (weight.zeros, weight.scales, weight.offsets) if each is not None]
    spread = {id(grid): grid[rows][:, columns].double() for grid in grids}
    codes = unpack(weight.codes) if weight.codes.dtype == torch.uint8 else weight.codes
    codes = torch.tensor(NUMBERS_OF_CODES[weight.table])[codes.int()] if weight.table else codes
    zeros = weight.zero_point if weight.zeros is None else spread[id(weight.zeros)]
    expected = (codes.double() - zeros) * spread[id(weight.scales)]
    expected += 0 if weight.offsets is None else spread[id(weight.offsets)]
    torch.testing.assert_close(matrix_of(weight), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name, unit",
    [("fp8, blocks", 16), ("int8, groups of 16", 16), ("int4, groups of 32", 32), ("fp4, groups of 16", 16)],
)
def test_kernels_read_tiles_that_hold_whole_pieces_alone(name, unit):
    """What a thread reads at once has one scale, or one for each half (fp4), and lies inside the row."""
    weight = make_weight(name, (40, 12 * unit), "cpu")
    piece = 16 * weight.codes_per_byte
    of_rows = {} if weight.table == FP4_TABLE else {"tile": (1, 0), "scales": torch.ones(40, 1)}
    for size in (unit // 4, unit // 2, unit, 3 * unit // 2, 2 * unit):
        tiles = weight._replace(tile=(1, size), scales=torch.ones(40, -(-12 * unit // size)))
        assert tiles.can_be_read() == (size == unit if weight.table == FP4_TABLE else size % unit == 0)
        cut_off = weight._replace(shape=(40, 10 * unit + size), **of_rows)
        assert cut_off.can_be_read() == (size % piece == 0)


@on_devices
@of_every_format
@pytest.mark.parametrize("shape", SHAPES)
def test_converting_is_exact_up_to_one_rounding(device, dtype, name, shape):
    skip_most_on_a_cpu(device, shape)
    weight = make_weight(name, shape, device)
    assert torch.equal(
        dequantise(weight, dtype), dequantise_torch(weight, slice(0, shape[0]), torch.float32).to(dtype)
    ) or (error(dequantise(weight, torch.float32), matrix_of(weight)) < (2e-3 if name == "nf4" else 1e-6))


@on_devices
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "nf4", "fp4"])
def test_every_code_is_the_same_number_everywhere(device, dtype, kind):
    """e4m3's subnormal numbers among them."""
    codes, zero_point = torch.arange(256, dtype=torch.uint8).view(8, 32), 0
    if kind in ("int4", "nf4", "fp4"):
        codes, zero_point = pack(codes & 15), 8 if kind == "int4" else 0
    elif kind == "int8":
        codes = codes.view(torch.int8)
    else:
        codes = codes.where(codes & 127 < 127, 0).view(torch.float8_e4m3fn)  # without NaN
    group = 16 if kind == "fp4" else 32
    scales = torch.ones(8, 32 // group, device=device)
    weight = QuantisedWeight(codes.to(device), (8, 32), scales, (1, group), zero_point=zero_point)
    weight = weight._replace(table={"nf4": NF4_TABLE, "fp4": FP4_TABLE}.get(kind, 0))
    matrix = matrix_of(weight).to(dtype)
    assert torch.equal(dequantise(weight, dtype), matrix)
    x = torch.eye(32, device=device, dtype=dtype)
    assert torch.equal(multiply_by_codes(x, weight), matrix.T)
    for row in range(0, 32 if device == "cuda" else 8, 2):  # the interpreter takes long
        pair = slice(row, row + 2)
        assert torch.equal(quantised_matvec.quantised_matvec(x[pair], weight), matrix[:, pair].T)


@pytest.mark.parametrize("assembly, dtype", [(nf4.TO_BF16, torch.bfloat16), (nf4.TO_F16, torch.float16)])
@pytest.mark.parametrize("table, expected", [(0, nf4.NUMBERS), (1, nf4.FP4_NUMBERS)])
def test_the_instructions_that_look_numbers_up_find_these(assembly, dtype, table, expected):
    expected = torch.tensor(expected).to(dtype)
    for low in range(16):
        codes = [(low + 3 * i) % 16 for i in range(8)]  # low and high halves of four bytes in turn
        words = ptx.run(assembly.value[table], 4, [sum(code << 4 * i for i, code in enumerate(codes))])
        numbers = torch.tensor([x >> shift & 0xFFFF for x in words for shift in (0, 16)], dtype=torch.int32)
        numbers = numbers.to(torch.int16).view(dtype).float()
        is_exact = numbers == expected[codes[::2] + codes[1::2]].float()
        if dtype == torch.float16:  # of nf4 the next smaller one
            is_exact |= (numbers == 1151 / 2048) & (expected[codes[::2] + codes[1::2]] == 1152 / 2048)
        assert is_exact.all(), codes


@pytest.mark.parametrize("kind", [1, 2], ids=["int8", "int4"])
def test_the_instructions_that_multiply_integers_add_up_their_products(kind):
    """Of 16 bytes of codes; high and low bytes of inputs of 15 bits are operands of their own."""
    rng = random.Random(kind)
    extremes = (2**14, -(2**14), -1, 0)
    for _ in range(20):
        data = rng.randbytes(16)
        inputs = [rng.choice([*extremes, rng.randrange(-(2**14), 2**14)]) for _ in range(32)]
        words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, 16, 4)]
        codes, groups = (
            [byte & 15 for byte in data] + [byte >> 4 for byte in data],
            [inputs[:16], inputs[16:]],
        )
        start = 1000
        if kind == 1:
            codes, groups = [byte - 256 * (byte >> 7) for byte in data], groups[:1]
        if kind == 2:  # where the high halves stand, they are 16 times as large
            start *= 16
        for eight in (group[i : i + 8] for group in groups for i in (0, 8)):
            for shift in (8, 0):
                byte = bytes(x >> shift & 255 for x in eight)
                words += [int.from_bytes(byte[i : i + 4], "little") for i in (0, 4)]
        expected = 1000 + sum(code * x for code, x in zip(codes, inputs, strict=False))
        assert ptx.run(multiply_words.ASSEMBLY.value[kind], 1, [*words, start]) == [expected & 0xFFFFFFFF]


@on_devices
@of_every_format
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_matrix_vector_products_are_right(device, dtype, name, shape, rows):
    skip_most_on_a_cpu(device, shape, rows, 2)
    weight = make_weight(name, shape, device)
    matrix, (height, width) = matrix_of(weight), shape
    x = torch.randn(rows, 2 * width, device=device, dtype=dtype)[:, :width] * 3
    bias = torch.randn(height, device=device, dtype=dtype)
    norm = torch.rand(width, device=device, dtype=dtype) + 0.5
    residual = torch.randn(rows, height, device=device, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3

    expected = x.double() @ matrix.T + bias.double() + residual.double()
    got = quantised_matvec.quantised_matvec(x, weight, bias, residual=residual)
    assert error(got, expected) < tolerance

    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    gate, up = (wide @ matrix.T).chunk(2, dim=-1)
    got = quantised_matvec.quantised_matvec(x, weight, None, norm, EPS, silu_and_mul=True)
    assert error(got, F.silu(gate) * up) < 2 * tolerance


COMPILED_GEMV = """
import torch.nn.functional as F
from kernel_checks import error
from quantised_weights import make_weight
from nanovllm.extensions.experts.kernels import gemv_codes
from nanovllm.extensions.experts.kernels.experts import ExpertWeights
from nanovllm.extensions.experts.kernels.moe import run_experts_torch
from nanovllm.extensions.experts.kernels.router import Chosen
from nanovllm.extensions.quantised.kernels.quantised_matvec import quantised_matvec
from nanovllm.extensions.quantised.kernels import quantised_weight
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise_torch

def rand(*shape):
    return torch.randn(shape).bfloat16()

def normalised(x, norm):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()

EPS = 1e-5
names = ("fp8, a scale a row", "int8, groups of 32 with offsets", "int4, groups of 32",
         "int4, groups of 64 with zeros", "nf4", "fp4, groups of 16")
for name in names:
    for rows, shape in (1, (16, 128)), (2, (24, 1024)):  # less than a thread's inputs, and more
        weight, x, norm = make_weight(name, shape, "cpu"), rand(rows, shape[1]), rand(shape[1])
        matrix = dequantise_torch(weight, slice(0, shape[0]), torch.float64)
        residual = rand(rows, shape[0])
        got = quantised_matvec(x, weight, residual=residual)
        assert error(got, x.double() @ matrix.T + residual) < 5e-3, (name, shape)
        gate, up = (normalised(x, norm) @ matrix.T).chunk(2, dim=-1)
        got = quantised_matvec(x, weight, None, norm, EPS, silu_and_mul=True)
        assert error(got, F.silu(gate) * up) < 1e-2, (name, shape)

COUNT, HIDDEN, WIDTH, TOP_K = 3, 352, 96, 2
gpu, runtime.compiling_for = runtime.compiling_for, None
plain = []
for shape in (COUNT * 2 * WIDTH, HIDDEN), (COUNT * HIDDEN, WIDTH):
    codes = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8)
    scales = torch.randint(118, 130, (shape[0], shape[1] // 32), dtype=torch.uint8)
    plain.append(QuantisedWeight(codes, shape, scales.view(torch.float8_e8m0fnu), (1, 32)))
bricks = [quantised_weight.in_bricks(weight) for weight in plain]
runtime.compiling_for = gpu
int4 = [make_weight("int4, groups of 32", weight.shape, "cpu") for weight in plain]
x, norm, residual = rand(2, HIDDEN), rand(HIDDEN), rand(2, HIDDEN)
chosen = Chosen(torch.tensor([[2, 0], [1, 2]], dtype=torch.int32), torch.rand(2, TOP_K))
for weights, readable in (bricks, plain), (int4, int4):
    gated, got, experts = rand(2 * TOP_K, WIDTH), rand(2, HIDDEN), ExpertWeights(*weights, COUNT)
    gemv_codes.multiply_gates_codes(x, experts, chosen, norm, EPS, gated)
    gemv_codes.multiply_and_sum_codes(gated, experts, chosen, residual, got)
    expected = run_experts_torch(normalised(x, norm), ExpertWeights(*readable, COUNT), chosen).sum(1)
    assert error(got, expected + residual) < 1e-2
"""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="compiles with Triton")
def test_compiled_products_of_a_row_or_two_are_right_without_a_gpu():
    """The compiler has been wrong about tensors of five dimensions, of which threads held more than one."""
    run_compiled(COMPILED_GEMV)


@on_devices
def test_a_weight_of_parts_in_several_formats_is_multiplied_as_one(device, dtype):
    """As a GGUF file has queries, keys and values."""
    names, heights = ["int4, groups of 32 with offsets", "int8, groups of 16", "nf4"], [16, 16, 32]
    parts = [make_weight(name, (height, 128), device) for name, height in zip(names, heights, strict=True)]
    matrix = torch.cat([*map(matrix_of, parts)])
    x, norm = torch.randn(2, 128, device=device, dtype=dtype), torch.rand(128, device=device, dtype=dtype)
    bias = torch.randn(64, device=device, dtype=dtype)
    residual = torch.randn(2, 64, device=device, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    got = quantised_matvec.matvec_of_parts(x, parts, bias, residual=residual)
    assert error(got, x.double() @ matrix.T + bias.double() + residual.double()) < tolerance
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    gate, up = (wide @ matrix.T).chunk(2, dim=-1)
    got = quantised_matvec.matvec_of_parts(x, parts, norm_weight=norm, eps=EPS, silu_and_mul=True)
    assert error(got, F.silu(gate) * up) < 2 * tolerance


@on_devices
@pytest.mark.parametrize("size", [2e-38, 1e-30, 1e6])  # the first is near the smallest
@pytest.mark.parametrize("name", ["fp8, a scale a row", "int8, a scale a row", "int4, groups of 32"])
def test_matrix_vector_products_take_inputs_of_every_size(device, dtype, name, size):
    if device == "cpu" and size != 1e6:
        pytest.skip("the interpreter has no float16 into whose range they are brought")
    weight = make_weight(name, (64, 256), device)
    weight = weight._replace(scales=1000 * weight.scales)
    x = torch.randn(2, 256, device=device, dtype=dtype)
    x[0], x[1, 1:] = x[0] * size, 0  # a row of one input
    x[1, 0] = size
    got = quantised_matvec.quantised_matvec(x, weight)
    for row in range(2):
        assert error(got[row] / size, x[row].double() / size @ matrix_of(weight).T) < 5e-3
    zero = quantised_matvec.quantised_matvec(torch.zeros_like(x), weight)
    assert not zero.any()


@on_devices
@of_every_format
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 20, 40, 70, 256])
def test_products_of_some_rows_are_right(device, dtype, name, shape, rows, monkeypatch):
    skip_most_on_a_cpu(device, shape, rows, 20)
    if device == "cpu":
        # Tiles so small that several programs share the inputs of one.
        monkeypatch.setattr(grouped_codes, "LINEAR_TILES", {256: (Tile(16, 2, BLOCK_N=16, WARPS=1), 8)})
        monkeypatch.setattr(grouped_gemm, "MIN_INPUTS", 1)
    weight = make_weight(name, shape, device)
    x = torch.randn(rows, 2 * shape[1], device=device, dtype=dtype)[:, : shape[1]]
    bias = torch.randn(shape[0], device=device, dtype=dtype)
    expected = x.double() @ matrix_of(weight).T + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3  # weights are rounded too, offsets before that
    for _ in range(2):  # the counters of arrivals are as they were
        assert error(multiply_by_codes(x, weight, bias), expected) < tolerance
    assert not arrival_counters(x.device).any()


@on_devices
@of_every_format
@pytest.mark.parametrize("rows", [3, 40, 256])
def test_products_of_inputs_in_float16_are_right(device, dtype, name, rows):
    """Weights are rounded to float16, too, which has more bits than bfloat16."""
    if device == "cpu" and (rows != 3 or "zeros" not in name or "int4" not in name):
        pytest.skip("takes long in the interpreter")
    weight = make_weight(name, SHAPES[0], device)
    x = torch.randn(rows, SHAPES[0][1], device=device, dtype=torch.float16)
    y = multiply_by_codes(x, weight)
    assert y.dtype == torch.float16 and error(y, x.double() @ matrix_of(weight).T) < 2e-3


LARGE = (5376, 4096)  # 1,344 steps of wide tiles, 10 for each of 132 multiprocessors


@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
def test_large_weights_of_4_bits_have_wide_tiles_for_many_rows(monkeypatch):
    gpu = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=233472)
    monkeypatch.setattr(runtime, "compiling_for", gpu)

    def is_wide(rows: int, name: str, shape: tuple[int, int]) -> bool:
        tile = grouped_codes.linear_tile(rows, make_weight(name, shape, "cpu"), torch.device("cpu"))
        return tile.BLOCK_M == grouped_codes.WIDE_TILE.BLOCK_M

    assert is_wide(129, "int4, groups of 32", LARGE) and is_wide(256, "nf4", LARGE)
    assert not is_wide(128, "nf4", LARGE) and not is_wide(256, "nf4", (5120, 4096))
    assert not is_wide(256, "int8, groups of 16", LARGE)
    gpu.shared_memory_per_multiprocessor = 102400
    assert not is_wide(256, "nf4", LARGE)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", [name for name in FORMATS if "4" in name])
@pytest.mark.parametrize("rows, width", [(129, 4096), (256, 4096 + 64)])
def test_products_of_large_weights_and_many_rows_are_right(rows, width, name):
    weight = make_weight(name, (LARGE[0], width), "cuda")
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ matrix_of(weight).T
    assert error(multiply_by_codes(x, weight, None), expected) < 8e-3


@on_devices
@pytest.mark.parametrize("per_byte", [1, 2])
def test_permuted_inputs_are_all_there_and_then_zeros(device, dtype, per_byte):
    x = 1 + torch.randperm(2 * 1100, device=device).view(2, 1100)  # more than a program permutes
    permuted = permute_k(x, per_byte)
    assert permuted.shape == (2, 1280)
    assert torch.equal(permuted.sort(1, descending=True)[0][:, :1100], x.sort(1, descending=True)[0])
    assert torch.equal(permuted.sum(1), x.sum(1))


@on_devices
@pytest.mark.parametrize("name", ["int8, groups of 16", "int4, groups of 32 with offsets", "nf4"])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_rows_stay_permuted_from_the_norm_to_the_end_of_a_layer(device, dtype, name, rows, monkeypatch):
    if device == "cpu":
        if rows != 7:
            pytest.skip("takes long in the interpreter")
        tile = Tile(16, 2, BLOCK_N=16, BLOCK_K=256, WARPS=1)
        monkeypatch.setattr(grouped_codes, "LINEAR_TILES", {256: (tile, 99)})
        monkeypatch.setattr(grouped_gemm, "MIN_INPUTS", 1)
    hidden, width = (256, 256) if device == "cpu" else (512, 256)
    up, down = make_weight(name, (2 * width, hidden), device), make_weight(name, (hidden, width), device)
    norm = RMSNorm(hidden).to(device, dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x, added = torch.randn(2, rows, hidden, device=device, dtype=dtype)
    bias = torch.randn(2 * width, device=device, dtype=dtype)
    stream = PendingAdd(x, norm, pending_add=added)
    gates = CodesProduct(up).norm_linear(stream, bias, gated=True)
    after = CodesProduct(down).linear_add(stream, gates, None, norm)

    total = (x + added).double()
    normed = norm(x + added).double()
    gate, value = (normed @ matrix_of(up).T + bias.double()).chunk(2, dim=-1)
    expected = F.silu(gate) * value
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert error(gates.activated(), expected) < tolerance
    assert error(stream.normalised(), normed) < tolerance  # for others, in its own order
    assert error(after.residual(), total + expected @ matrix_of(down).T) < tolerance
    other = make_weight("int8, groups of 16" if "int8" not in name else "nf4", (hidden, width), device)
    assert error(CodesProduct(other).linear(gates, None), expected @ matrix_of(other).T) < tolerance
    y = CodesProduct(up).norm_linear(after, None)
    assert error(y, norm(after.x).double() @ matrix_of(up).T) < tolerance


IN_8_BITS = ["int4, groups of 128 with zeros", "int4, a zero a row", "int4, a scale a row"]


def skip_unless_hopper(device):
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@on_devices
@pytest.mark.parametrize("name", IN_8_BITS)
@pytest.mark.parametrize("rows", [1, 20, 21, 70, 300])
def test_int4_times_rounded_inputs_is_exact(device, dtype, name, rows, monkeypatch):
    """With each tile, and where programs share the inputs of one."""
    skip_unless_hopper(device)
    shape = (72, 768) if device == "cpu" else (1160, 4224)  # two steps for each of three
    if device == "cpu":
        if rows != 20:
            pytest.skip("takes long in the interpreter")
        monkeypatch.setattr(grouped_int4, "INT4_TILES", {20: Tile(16, 2, BLOCK_N=16, WARPS=1)})
        monkeypatch.setattr(grouped_gemm, "MIN_INPUTS", 1)
        monkeypatch.setattr(grouped_int4, "PROGRAMS", 8)
    weight = make_weight(name, shape, device)
    x = 5 + torch.randn(rows, shape[1], device=device, dtype=dtype)  # a sum that zeros take much off
    bias = torch.randn(shape[0], device=device, dtype=dtype)
    quantised = fp8_linear.quantise(x, 0, 2)
    assert error(in_order(quantised), x) < 0.05
    sums = in_order(quantised).unflatten(1, (-1, 128)).sum(-1)
    assert error(quantised.sums[:, :rows].T * quantised.scales[:rows, None], sums) < 1e-5
    expected = in_order(quantised) @ matrix_of(weight).T + bias.double()
    for _ in range(2):  # the counters of arrivals are as they were
        y = grouped_int4.linear_int4(quantised, weight, bias)
        assert error(y, expected) < (1e-5 if dtype == torch.float32 else 4e-3)
    assert not arrival_counters(x.device).any()


@on_devices
@pytest.mark.parametrize("name", IN_8_BITS)
def test_int4_becomes_fp8_without_a_loss_for_very_many_rows(device, dtype, name):
    """And torch's library multiplies it by rows that have a scale for each 128 inputs."""
    weight = make_weight(name, (144, 512), device)
    unpacked = grouped_int4.in_fp8(weight)
    assert unpacked.is_fp8 and unpacked.tile == (1, 128) and unpacked.scales.shape == (144, 4)
    assert torch.equal(matrix_of(unpacked), matrix_of(weight))
    if device == "cuda":
        skip_unless_hopper(device)
        x = 5 + torch.randn(1500, 512, device=device, dtype=dtype)
        rounded = fp8_linear.quantise(x, 128)
        scales = rounded.scales[:, :1500].T.double().repeat_interleave(128, 1)
        expected = (rounded.codes[:1500].double() * scales) @ matrix_of(weight).T
        assert error(UnpackedInt4Product(weight).linear(x, None), expected) < 4e-3


@on_devices
@pytest.mark.parametrize("rows", [3, 300])
def test_rows_are_rounded_for_int4_by_the_norm_and_the_activation(device, dtype, rows):
    skip_unless_hopper(device)
    if device == "cpu" and rows != 3:
        pytest.skip("takes long in the interpreter")
    hidden, width = 256, 384
    norm = RMSNorm(hidden).to(device, dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x, added = torch.randn(2, rows, hidden, device=device, dtype=dtype)
    up, down = (make_weight(IN_8_BITS[0], shape, device) for shape in ((2 * width, hidden), (hidden, width)))
    stream = PendingAdd(x, norm, pending_add=added)
    gates = Int4Product(up).norm_linear(stream, None, gated=True)
    after = Int4Product(down).linear_add(stream, gates, None, norm)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return in_order(fp8_linear.quantise(x.to(dtype), 0, 2))

    tolerance = 1e-4 if dtype == torch.float32 else 3e-2  # a norm that is not rounded may get another code
    gate, value = (rounded(norm(x + added)) @ matrix_of(up).T).chunk(2, dim=-1)
    expected = F.silu(gate) * value
    assert error(gates.activated(), expected) < tolerance
    assert error(stream.normalised(), norm(x + added)) < tolerance
    expected = (x + added).double() + rounded(expected) @ matrix_of(down).T
    assert error(after.residual(), expected) < tolerance
    y = Int4Product(up).linear(after.residual(), None)
    assert error(y, rounded(after.x) @ matrix_of(up).T) < tolerance


def test_int4_inputs_are_rounded_where_a_hopper_gpu_multiplies_whole_groups(monkeypatch):
    def can_round(name: str, width: int = 256, dtype: torch.dtype = torch.bfloat16) -> bool:
        return grouped_int4.can_round_inputs(make_weight(name, (16, width), "cpu"), dtype)

    assert not can_round(IN_8_BITS[0])  # on a CPU
    gpu = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(runtime, "compiling_for", gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert all(map(can_round, IN_8_BITS)) and can_round(IN_8_BITS[0], dtype=torch.float16)
    assert not any(map(can_round, {*FORMATS} - {*IN_8_BITS}))
    assert not can_round(IN_8_BITS[1], 96) and not can_round(IN_8_BITS[0], dtype=torch.float32)
    gpu.major = 10
    assert not can_round(IN_8_BITS[0])


def prepared(x, residual, gain, group, keep=False) -> tuple:
    return fp8_linear.prepare_rows(x, group, keep, residual=residual, weight=gain, eps=EPS)


def values_of(rows: QuantisedRows) -> torch.Tensor:
    codes, count = rows.codes[: rows.rows].double(), rows.rows
    if rows.scales.dim() == 1:
        return codes * rows.scales[:count, None].double()
    return (codes.unflatten(1, (-1, 128)) * rows.scales[:, :count].T[..., None].double()).flatten(1)


@on_devices
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("width", [128, 384])
@pytest.mark.parametrize("rows", [1, 17])
def test_quantised_rows_are_the_rows_within_the_rounding_of_their_largest(device, dtype, rows, width, group):
    x = torch.randn(rows, 2 * width, device=device, dtype=dtype)[:, :width]
    x[0] = 0
    x[-1, 3] = 1e4 if rows > 1 else 0
    gain = torch.rand(width, device=device, dtype=dtype) + 0.5
    residual = torch.randn(rows, width, device=device, dtype=dtype)

    def check(got: QuantisedRows, expected: torch.Tensor) -> None:
        parts = expected.double().unflatten(1, (-1, group or width))
        largest = parts.abs().amax(-1, keepdim=True).expand_as(parts).flatten(1)
        # Half a step of e4m3, and what the order of float32 operations and the model's dtype leave open.
        room = expected.double().abs() * (2**-4 + 2**-7) + largest * (
            2**-9 / 448 + 2**-8 * (device == "cuda")
        )
        wrong = ~((values_of(got) - expected.double()).abs() <= room)  # NaN is
        if device == "cpu":  # the interpreter rounds 127 to 64, for want of a carry to the exponent
            wrong &= ~((expected / values_of(got)).abs() >= 1.9)
        assert not wrong.any()
        assert got.rows == rows and len(got.codes) % 16 == 0

    check(fp8_linear.quantise(x, group), x)
    check(fp8_linear.quantise_torch(x, group), x)
    normed, total = fp8_linear.add_rms_norm_torch(x, residual, gain, EPS)
    got, got_total, _ = prepared(x, residual, gain, group)
    check(got, normed)
    assert error(got_total, total) < 1e-2
    check(prepared(residual, None, gain, group)[0],
          fp8_linear.add_rms_norm_torch(residual, None, gain, EPS)[0])  # fmt: skip
    product = torch.randn(rows, 2 * width, device=device, dtype=dtype) * 100
    unscaled = Unscaled(product, torch.rand(32, device=device) / 50, torch.rand(2 * width, device=device))
    plain = product.double() * unscaled.row_scales[:rows, None] * unscaled.column_scales
    assert error(unscaled.scaled(), plain) < 5e-3
    gate, up = plain.chunk(2, dim=-1)
    check(fp8_linear.quantise(unscaled, group, gated=True), F.silu(gate) * up)
    half = Unscaled(product[:, :width], unscaled.row_scales, unscaled.column_scales[:width])
    got, got_total, normed = prepared(half, residual, gain, group, True)
    assert error(got_total, plain[:, :width] + residual.double()) < 5e-3
    assert error(normed, fp8_linear.add_rms_norm_torch(got_total, None, gain, EPS)[0]) < 1e-2
    parts = torch.randn(rows, 3, width, device=device, dtype=dtype)
    got, got_total, normed = prepared(parts, residual, gain, group, True)
    assert error(got_total, parts.double().sum(1) + residual.double()) < 5e-3
    check(got, normed)


# What multiplies one row, and 20 rows, on GPUs of some compute capabilities.
USED = {
    ("fp8, blocks", 7, 5): ("library", "library"),
    ("fp8, blocks", 8, 0): ("linear", "linear"),
    ("fp8, blocks", 8, 9): ("matvec", "linear"),
    ("fp8, blocks", 9, 0): ("matvec", "8 bits"),
    ("fp8, a scale a row", 8, 6): ("linear", "linear"),
    ("fp8, a scale a row", 8, 9): ("matvec", "8 bits"),
    ("fp8, a scale a row", 12, 0): ("matvec", "8 bits"),
    ("int8, groups of 16", 7, 5): ("library", "library"),
    ("int8, groups of 16", 8, 0): ("matvec", "linear"),
    ("int4, groups of 32", 7, 5): ("library", "library"),
    ("int4, groups of 32", 8, 6): ("matvec", "linear"),
    ("int4, groups of 32", 9, 0): ("matvec", "linear"),
    ("nf4", 7, 5): ("library", "library"),
    ("nf4", 9, 0): ("matvec", "linear"),
}


@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
@pytest.mark.parametrize("name, major, minor", USED)
def test_a_gpu_is_given_only_kernels_that_it_has_the_instructions_for(name, major, minor, monkeypatch):
    monkeypatch.setattr(runtime, "compiling_for", SimpleNamespace(major=major, minor=minor))
    monkeypatch.setattr(runtime, "TRITON_DEVICES", {"cpu"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    weight = make_weight(name, (512, 512), "cpu")

    def used(rows: int, is_decode: bool, dtype: torch.dtype = torch.bfloat16) -> str:
        x = torch.empty(rows, 512, dtype=dtype)
        if is_decode and quantised_matvec.can_use_quantised_matvec(x, weight):
            return "matvec"
        if fp8_linear.can_use_fp8(x, weight):
            return "8 bits"
        return "linear" if grouped_codes.can_use_linear_codes(x, weight) else "library"

    assert (used(1, True), used(20, True)) == USED[name, major, minor]
    assert used(1, False) == USED[name, major, minor][1]  # a prefill
    assert used(257, True) == ("8 bits" if USED[name, major, minor][1] == "8 bits" else "library")
    assert used(20, True, torch.float16) == ("linear" if major >= 8 else "library")
    assert used(1, True, torch.float32) == "library"
    monkeypatch.setattr(torch.version, "cuda", None)  # another maker's GPU
    assert used(1, True) == used(20, True) == "library"


ON_A_DESKTOP = """
from nanovllm.extensions.quantised.kernels import grouped_codes, permute_k
from nanovllm.extensions.quantised.kernels import quantised_matvec
from nanovllm.extensions.quantised.kernels import quantised_weight
from quantised_weights import make_weight

for name in ("fp8, blocks", "int8, groups of 32 with offsets", "int4, groups of 128 with zeros", "nf4"):
    x, weight = torch.empty(128, 1024, dtype=torch.bfloat16), make_weight(name, (1024, 1024), "cpu")
    grouped_codes.linear_codes(permute_k.permute_k(x, weight.codes_per_byte), weight)
    quantised_weight.dequantise(weight, torch.bfloat16)
quantised_matvec.quantised_matvec(x[:1], weight)
"""


@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="compiles with Triton")
def test_products_of_some_rows_compile_for_a_desktop_gpu_and_fit_into_its_shared_memory():
    shared = shared_memory_of(ON_A_DESKTOP)
    assert len(shared) == 13 and max(shared) <= SHARED_MEMORY


@on_devices
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["fp8, a scale a row", "fp8, blocks"])
@pytest.mark.parametrize("rows, early", [(1, 1024), (1, 256), (17, 256), (64, 256)])
def test_a_few_rows_in_8_bits_are_multiplied_by_our_own_kernel(
    device, dtype, rows, early, name, gated, monkeypatch
):
    """Two programs share the inputs of each tile, but where gates are applied."""
    monkeypatch.setattr(grouped_fp8, "EARLY_INPUTS", early)
    monkeypatch.setattr(grouped_fp8, "MAX_EARLY_ROWS", 32)
    if device == "cpu" and rows != 17:
        pytest.skip("takes long in the interpreter")
    if device == "cuda" and not gpu_supports(torch.device(device), 8, 9):
        pytest.skip("needs a GPU that multiplies in 8 bits")
    if device == "cpu":
        monkeypatch.setattr(grouped_fp8, "PROGRAMS", 3)
    weight = make_weight(name, (384, 1024), device)
    x, bias = torch.randn(rows, 1024, device=device), torch.randn(384, device=device, dtype=dtype)
    assert grouped_fp8.linear_tile(rows, weight, x.device).SPLITS == 2
    # The interpreter rounds 127 to 64, for want of a carry to the exponent.
    quantised = fp8_linear.quantise_torch(x.to(dtype), weight.group)
    expected = values_of(quantised) @ matrix_of(weight).T + bias.double()
    if gated:
        gate, value = expected.chunk(2, dim=1)
        expected = F.silu(gate) * value
    for _ in range(2):  # the counters of arrivals are as they were
        y = grouped_fp8.linear_fp8(quantised, weight, bias, gated)
        assert y.dtype == dtype and error(y, expected) < (1e-5 if dtype == torch.float32 else 5e-3)
    assert not arrival_counters(x.device).any()


def test_codes_are_loaded_early_where_it_is_known_which_are_needed(monkeypatch):
    def can_load_early(rows=8, name="fp8, a scale a row", in_features=1024, experts=None):
        weight = make_weight(name, (256, in_features), "cpu")
        tile = next(tile for most, tile in grouped_fp8.LINEAR_TILES.items() if rows <= most)
        out = torch.empty(rows, 256, dtype=torch.bfloat16)
        return grouped_fp8.can_load_early(weight, GroupedProduct(None, experts, out, tile))

    assert can_load_early() and can_load_early(rows=32)
    assert not can_load_early(rows=33) and not can_load_early(name="fp8, blocks")
    assert not can_load_early(in_features=512) and not can_load_early(experts=(None, None, 1))
    monkeypatch.setattr(grouped_fp8, "has_hopper_shared_memory", lambda device: False)
    assert not can_load_early()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("leave_scales", [False, True])
@pytest.mark.parametrize("name", ["fp8, a scale a row", "fp8, blocks"])
@pytest.mark.parametrize("rows", [1, 3, 16, 130, 300])
def test_products_in_8_bits_are_right(rows, name, leave_scales):
    weight = make_weight(name, (384, 1024), "cuda")
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    if not fp8_linear.can_use_fp8(x, weight):
        pytest.skip("needs a GPU that multiplies in 8 bits")
    quantised = fp8_linear.quantise(x, weight.group)
    expected = values_of(quantised) @ matrix_of(weight).T
    y = fp8_linear.fp8_linear(quantised, weight, None, leave_scales)
    assert isinstance(y, Unscaled) == (leave_scales and not weight.group)
    assert error(y.scaled() if isinstance(y, Unscaled) else y, expected) < 5e-3
    bias = torch.randn(384, device="cuda", dtype=torch.bfloat16)
    y = fp8_linear.fp8_linear(quantised, weight, bias, leave_scales)
    assert error(y, expected + bias.double()) < 5e-3
