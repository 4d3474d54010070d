"""`fused_linear` for up to MAX_SMALL_ROWS rows and small weights.

Such a product takes as long as it takes to get the first bytes, multiply them and store the result. So a
program has few rows of the weight and loads all of them before it waits for the kernel that computes its
input; each of its warps multiplies a part of the inputs.
"""

from torch import Tensor

from nanovllm.extensions.products.kernels.fused_linear import (
    can_fuse,
    load_squares,
    new_results,
    store_with_squares,
)
from nanovllm.extensions.products.kernels.gemv import can_use_gemv, combine_pairs, rows_of_weight
from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    MIN_DOT_SIZE,
    cdiv,
    masked_load,
    next_power_of_2,
    overlap_options,
    tl,
    triton,
)

MAX_SMALL_ROWS = 8  # the fewest columns that the matrix unit computes
HEIGHT = 16  # rows of the weight that a program has: the fewest that the matrix unit takes
FEW_INPUTS = 1024
FEW_OUTPUTS = 256  # which leave most of the GPU to do nothing, however many inputs there are
MAX_INPUTS = 3072  # of more `gemv` multiplies two rows faster, and `fused_linear` eight as fast


def can_use_small_gemm(x: Tensor, weight: Tensor) -> bool:
    """Whether these rows [rows, in] are multiplied fastest so, without anything folded in."""
    is_small = 0 < len(x) <= MAX_SMALL_ROWS and len(weight) <= FEW_OUTPUTS and weight.shape[1] <= MAX_INPUTS
    return is_small and can_use_gemv(weight) and can_fuse(0, weight)  # beside any residual


def small_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    silu_and_mul: bool = False,
    residual: Tensor | None = None,
    next_norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `fused_linear`."""
    rows, in_features = x.shape
    out_features = len(weight)
    programs = cdiv(out_features, HEIGHT)
    outputs = out_features // (1 + silu_and_mul)
    out, scaled, new_squares = new_results(x, outputs, programs, residual is not None)
    # Inputs are multiplied by so many warps, so many by each of them at a time. Programs with short rows are
    # small and share a multiprocessor; long rows need more warps, as a program has one for itself.
    num_warps, width = (2, 256) if in_features <= FEW_INPUTS else (4, 128)
    width = min(width, max(MIN_DOT_SIZE, next_power_of_2(in_features) // num_warps))
    num_squares = 0 if squares is None else squares.shape[1]
    _small_gemm_kernel[(programs,)](
        x, weight, bias, squares, residual, next_norm_weight, scaled, new_squares, out,
        eps, x.stride(0), rows, out_features,
        IN_FEATURES=in_features, ROWS=MAX_SMALL_ROWS, HEIGHT=HEIGHT, PARTS=num_warps, WIDTH=width,
        GATED=silu_and_mul, NUM_SQUARES=num_squares, SQUARES_PAD=next_power_of_2(num_squares),
        num_warps=num_warps, **overlap_options(x.device),
    )  # fmt: skip
    return out, scaled, new_squares


@triton.jit(do_not_specialize=["rows"])
def _small_gemm_kernel(
    x, weight, bias, squares, residual, next_norm_weight, scaled, new_squares, out,
    eps, x_stride, rows, out_features,
    IN_FEATURES: tl.constexpr, ROWS: tl.constexpr, HEIGHT: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, GATED: tl.constexpr, NUM_SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes HEIGHT rows of the weight, and each of its PARTS warps WIDTH columns at a time."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # which load their weights, too
    first = tl.program_id(0) * HEIGHT
    out_feature, weight_row = rows_of_weight(first, out_features, HEIGHT, GATED)
    is_real = out_feature < out_features
    column = tl.arange(0, PARTS)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    its_weight = weight + weight_row[None, :, None].to(tl.int64) * IN_FEATURES + column
    tiles = ()
    for start in tl.static_range(0, IN_FEATURES, PARTS * WIDTH):
        is_there = is_real[None, :, None] & (start + column < IN_FEATURES)
        tiles += (masked_load(its_weight + start, is_there),)
    if bias is not None:
        added = masked_load(bias + weight_row, is_real)
    if residual is not None:
        gain = masked_load(next_norm_weight + out_feature, is_real)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    row = tl.arange(0, ROWS)
    is_row = row < rows
    if NUM_SQUARES > 0:
        its_squares = load_squares(squares, row, is_row, NUM_SQUARES, SQUARES_PAD)
    if residual is not None:
        place = row[:, None] * out_features + out_feature[None, :]
        its_residual = masked_load(residual + place, is_row[:, None] & is_real[None, :])
    its_x = x + row[None, :, None] * x_stride + column
    x_tiles = ()
    for start in tl.static_range(0, IN_FEATURES, PARTS * WIDTH):
        x_tiles += (masked_load(its_x + start, is_row[None, :, None] & (start + column < IN_FEATURES)),)
    acc = tl.zeros([PARTS, HEIGHT, ROWS], tl.float32)
    for i in tl.static_range(len(tiles)):
        x_tile = tl.permute(_kept_in_registers(x_tiles[i]), [0, 2, 1])
        acc = tl.dot(tiles[i], x_tile, acc, input_precision="ieee")
    acc = tl.trans(tl.sum(acc, axis=0))  # [ROWS, HEIGHT]

    if NUM_SQUARES > 0:
        acc *= tl.rsqrt(tl.sum(its_squares, axis=1) / IN_FEATURES + eps)[:, None]
    if bias is not None:
        acc += added.to(tl.float32)[None, :]
    width = out_features
    if GATED:
        acc, out_feature = combine_pairs(acc, first)
        width = out_features // 2
    valid = is_row[:, None] & (out_feature < width)[None, :]
    place = row[:, None] * width + out_feature[None, :]
    if residual is not None:
        acc += its_residual.to(tl.float32)
        square = row * tl.num_programs(0) + tl.program_id(0)
        store_with_squares(acc, gain, out, scaled, new_squares, place, valid, square, is_row)
    else:
        tl.store(out + place, acc, mask=valid)


@triton.jit
def _kept_in_registers(x):
    """
    x, which stays in registers up to here. Triton would copy a loaded tile to shared memory right behind its
    load, and instructions are issued in order: the load of the next tile would wait until this one has come.
    An assembly instruction that it may not move keeps it from that.
    """
    if IS_INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2)
