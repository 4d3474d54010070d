"""The grouped GEMM of experts whose weights are dense.

What it shares with those of other weights is in `extensions/quantised/kernels/grouped_gemm.py`.
"""

from torch import Tensor

from nanovllm.extensions.quantised.kernels.grouped_gemm import (
    GroupedProduct,
    Tile,
    find_tile,
    rows_in_turn,
    store_tile,
)
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise
from nanovllm.kernels import runtime
from nanovllm.kernels.runtime import masked_load, tl, triton

# By the most assignments that an expert has on average. A prefill takes the last one, whatever its rows, so
# that a start compiles one way only.
DENSE_TILES = {
    8: Tile(16, 3),
    16: Tile(32, 3),
    1 << 30: Tile(64, 3, BLOCK_K=64),
    1 << 31: Tile(128, 4, BLOCK_N=256, BLOCK_K=64, WARPS=8),  # for prefills alone
}


def multiply_dense(x: Tensor, weight: Tensor | QuantisedWeight, product: GroupedProduct) -> None:
    """A weight that is not dense is converted first."""
    weight = dequantise(weight, x.dtype) if isinstance(weight, QuantisedWeight) else weight
    block_k = product.tile.BLOCK_K
    if x.element_size() == 4:
        block_k //= 2
    if not runtime.has_hopper_shared_memory(x.device):
        block_k //= 2
    product.launch(_grouped_kernel, weight, (x, weight, x.stride(0)), BLOCK_K=block_k)


@triton.jit(do_not_specialize=["tokens"])
def _grouped_kernel(x, weight, x_stride, operands, tokens, SIZES: tl.constexpr, OVERLAP: tl.constexpr):
    """The assignments are the rows: the matrix unit has as many of them as of the weight's."""
    tile = find_tile(operands, tokens, SIZES, OVERLAP)
    block, expert, assignment, is_real = tile
    if expert == SIZES.EXPERTS:
        return
    row, is_row = rows_in_turn(0, block, SIZES)
    first_row = expert.to(tl.int64) * (SIZES.PARTS * SIZES.OUT_FEATURES)
    column = tl.arange(0, SIZES.BLOCK_K)
    its_x = x + (assignment // SIZES.TOP_K)[:, None] * x_stride + column[None, :]
    its_weight = weight + first_row * SIZES.IN_FEATURES
    its_weight = its_weight + row[None, :] * SIZES.IN_FEATURES + column[:, None]
    acc = tl.full([SIZES.BLOCK_M, SIZES.BLOCK_N], 0.0, tl.float32)
    for start in range(0, SIZES.IN_FEATURES, SIZES.BLOCK_K):
        present = start + column < SIZES.IN_FEATURES
        x_tile = masked_load(its_x + start, is_real[:, None] & present[None, :])
        weight_tile = masked_load(its_weight + start, present[:, None] & is_row[None, :])
        acc = tl.dot(x_tile, weight_tile, acc, input_precision="ieee")
    store_tile(acc, first_row + row, is_row, tile, operands, SIZES, 1, True)
