"""Matrix products for a handful of rows, with what surrounds them in a decoder layer folded in.

For up to MAX_ROWS rows a product is one pass over the weight at memory bandwidth, and a general matrix kernel
plus separate small ones lose more time between kernels than in them. So here the RMSNorm of the input,
SwiGLU's activation and the residual add are part of the product, and each program asks for its weights before
it waits for the kernel that computes its input (see `overlap_options`).
"""

from torch import Tensor

from nanovllm.kernels.activation import silu
from nanovllm.kernels.runtime import (
    cdiv,
    is_on_gpu,
    masked_load,
    next_power_of_2,
    overlap_options,
    pdl_wait,
    tl,
    triton,
    use_triton,
)

MAX_ROWS = 2
LARGE_WEIGHT = 1 << 24  # elements
# Elements of a tile, fewest programs, most rows of the weight a program; by whether the weight is large.
TILES = {False: (4096, 1024, 4), True: (8192, 512, 8)}


def can_use_gemv(weight: Tensor) -> bool:
    """Whether `gemv` works for this weight and is the fastest way to multiply up to MAX_ROWS rows by it."""
    return is_on_gpu(weight) and use_triton(weight) and weight.element_size() == 2


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    silu_and_mul: bool = False,
) -> Tensor:
    """
    activation(rms_norm(x) @ weight.T + bias) + residual: [rows, out] for x [rows, in], of one row or two, and
    weight [out, in].

    Each part is left out unless asked for: the norm if norm_weight [in] is None, the addition if residual
    [rows, out] is. With silu_and_mul the first half of the weight's rows are gates, the second half is what
    they multiply, and the result is [rows, out / 2]. Sums are float32 and rounded once, at the end. The last
    dimension of x is contiguous, all others' are.
    """
    rows, in_features = x.shape
    out_features = weight.shape[0]
    # Enough programs to fill the chip, and each with rows enough that it seldom reads x.
    tile_elements, min_programs, max_height = TILES[weight.numel() >= LARGE_WEIGHT]
    height = next_power_of_2(out_features // min_programs + 1) // 2
    height = max(2, min(height, max_height // rows))
    width = min(next_power_of_2(in_features), tile_elements // (height * rows))
    out = x.new_empty(rows, out_features // (1 + silu_and_mul))
    _gemv_kernel[(cdiv(out_features, height),)](
        x, weight, bias, norm_weight, residual, out,
        eps, x.stride(0), out_features,
        IN_FEATURES=in_features, ROWS=rows, HEIGHT=height, WIDTH=width, GATED=silu_and_mul,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _gemv_kernel(
    x, weight, bias, norm_weight, residual, out,
    eps, x_stride, out_features,
    IN_FEATURES: tl.constexpr, ROWS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes HEIGHT rows of the weight (gates and ups in turn if GATED), WIDTH columns at a time."""
    first = tl.program_id(0) * HEIGHT
    out_feature, weight_row = rows_of_weight(first, out_features, HEIGHT, GATED)
    # Three dimensions throughout, [rows of x, rows of the weight, columns], so that no layout ever changes.
    column = tl.arange(0, WIDTH)[None, None, :]
    row = tl.arange(0, ROWS)
    address = weight + weight_row[None, :, None].to(tl.int64) * IN_FEATURES + column
    inside = (out_feature < out_features)[None, :, None]
    tile = masked_load(address, inside & (column < IN_FEATURES))
    pdl_wait(OVERLAP)

    # Sums are kept apart by column until the end: a reduction a tile costs more than the products.
    products = tl.zeros([ROWS, HEIGHT, WIDTH], tl.float32)
    squares = tl.zeros([ROWS, 1, WIDTH], tl.float32)
    for start in range(0, IN_FEATURES, WIDTH):
        current = tile.to(tl.float32)
        place = start + column
        tile = masked_load(address + start + WIDTH, inside & (place + WIDTH < IN_FEATURES))
        is_there = place < IN_FEATURES
        values = masked_load(x + row[:, None, None] * x_stride + place, is_there).to(tl.float32)
        if norm_weight is not None:
            squares += values * values
            values *= masked_load(norm_weight + place, is_there).to(tl.float32)
        products += current * values
    if norm_weight is None:
        acc = tl.sum(products, axis=2)
    else:
        # One reduction for both: a second would wait for the first.
        products, squares = tl.broadcast(products, squares)
        acc, square_sums = tl.split(tl.sum(tl.join(products, squares), axis=2))
        acc *= tl.rsqrt(square_sums / IN_FEATURES + eps)  # the same factor for every output: left for last
    if bias is not None:
        acc += masked_load(bias + weight_row, out_feature < out_features).to(tl.float32)[None, :]

    place = out_feature
    width = out_features
    if GATED:
        acc, place = combine_pairs(acc, first)
        width = out_features // 2
    valid = (place < width)[None, :]
    place = row[:, None] * width + place[None, :]
    if residual is not None:
        acc += masked_load(residual + place, valid)
    tl.store(out + place, acc, mask=valid)


@triton.jit
def rows_of_weight(first, out_features, HEIGHT: tl.constexpr, GATED: tl.constexpr):
    """HEIGHT outputs from `first` on, and the weight's rows for them: if GATED, gates and ups in turn."""
    out_feature = first + tl.arange(0, HEIGHT)
    weight_row = out_feature
    if GATED:
        weight_row = (out_feature % 2) * (out_features // 2) + out_feature // 2
    return out_feature, weight_row


@triton.jit
def combine_pairs(acc, first):
    """silu(gate) * up of sums [rows, HEIGHT] in the order of `rows_of_weight`, and which outputs it has."""
    HALF: tl.constexpr = acc.shape[1] // 2
    gate, up = tl.split(tl.reshape(acc, [acc.shape[0], HALF, 2]))
    return silu(gate) * up, first // 2 + tl.arange(0, HALF)
