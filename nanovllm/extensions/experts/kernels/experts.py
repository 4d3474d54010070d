"""What all kernels of a mixture of experts know: its weights, the activation between an expert's two
products, and which tile of tokens belongs to which expert.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.extensions.quantised.kernels.quantised_weight import (
    QuantisedWeight,
    dequantise,
    dequantise_torch,
)
from nanovllm.kernels.activation import silu_and_mul_torch
from nanovllm.kernels.runtime import cdiv, next_power_of_2, overlap_options, pdl_wait, tl, triton

# gpt-oss's activation is (up + 1) * gate * sigmoid(ALPHA * gate), with both kept within LIMIT.
ALPHA, LIMIT = 1.702, 7.0
ALPHA_OF_KERNELS, LIMIT_OF_KERNELS = tl.constexpr(ALPHA), tl.constexpr(LIMIT)


class ExpertWeights(NamedTuple):
    """
    The experts' matrices, one below the other. Of `gate_up` [experts * 2 * width, hidden] an expert has its
    gates first, then what they multiply; `down` is [experts * hidden, width]. Biases are as long as their
    matrix is high.
    """

    gate_up: Tensor | QuantisedWeight
    down: Tensor | QuantisedWeight
    num_experts: int
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    is_clamped: bool = False  # gpt-oss's activation in place of SwiGLU's

    @property
    def width(self) -> int:
        return self.down.shape[1]

    @property
    def are_quantised(self) -> bool:
        return isinstance(self.gate_up, QuantisedWeight) or isinstance(self.down, QuantisedWeight)

    def are_all(self, fit: Callable[[QuantisedWeight], bool]) -> bool:
        """Whether both matrices are quantised, and fit."""
        return all(isinstance(each, QuantisedWeight) and fit(each) for each in (self.gate_up, self.down))

    def matrix_torch(self, weight: Tensor | QuantisedWeight, expert: int, dtype: torch.dtype) -> Tensor:
        """An expert's part of one of the two, in floating point."""
        height = weight.shape[0] // self.num_experts
        rows = slice(expert * height, expert * height + height)
        if isinstance(weight, Tensor):
            return weight[rows]
        return dequantise_torch(weight, rows, weight.product_dtype).to(dtype)

    def dequantised(self, dtype: torch.dtype) -> "ExpertWeights":
        """With all matrices in floating point."""
        gate_up, down = (
            dequantise(each, dtype) if isinstance(each, QuantisedWeight) else each
            for each in (self.gate_up, self.down)
        )
        return self._replace(gate_up=gate_up, down=down)


class Groups(NamedTuple):
    """Pairs by expert. The tiles of all experts are numbered one after another."""

    pairs: Tensor  # int32 [experts, tokens]: an expert has a token once at most
    table: Tensor  # int32 [2, experts]: how many pairs each expert has, and where its tiles end
    max_tiles: int  # that there can be


class GroupedProduct(NamedTuple):
    """
    out[pair] = weight of its expert @ x[pair] + bias, multiplied by weights[pair]. With top_k x has a row for
    each token instead, and the first half of an expert's rows are gates, the second half is what they
    multiply. `tile` is of the kernel that computes it, and begins with its pairs.
    """

    bias: Tensor | None
    groups: Groups
    out: Tensor
    tile: tuple[int, ...]
    top_k: int = 0
    weights: Tensor | None = None
    is_clamped: bool = False

    @property
    def parts(self) -> int:
        return 2 if self.top_k else 1

    def launch(
        self, kernel: Any, lines: int, *inputs: Tensor | None, numbers: Any = (), **options: Any
    ) -> None:
        """A program of the kernel computes `lines` rows of an expert's weight for a tile of pairs."""
        groups, (num_experts, rows) = self.groups, self.groups.pairs.shape
        kernel[(groups.max_tiles * cdiv(self.parts * self.out.shape[1], lines),)](
            *inputs, self.bias, groups.pairs, groups.table, self.weights, self.out, *numbers, rows,
            EXPERTS=num_experts, EXPERTS_PAD=next_power_of_2(num_experts),
            PAIRS_PER_ROW=self.top_k or 1, PARTS=self.parts, CLAMPED=self.is_clamped,
            BLOCK_M=self.tile[0], **options, **overlap_options(self.out.device),
        )  # fmt: skip


def activate_torch(x: Tensor, is_clamped: bool = False) -> Tensor:
    """[..., 2 * width], gates first, -> [..., width]."""
    if not is_clamped:
        return silu_and_mul_torch(x)
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


@triton.jit
def activate(gate, up, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT_OF_KERNELS)
        up = tl.minimum(tl.maximum(up, -LIMIT_OF_KERNELS), LIMIT_OF_KERNELS)
        return (up + 1.0) * gate / (1.0 + tl.exp(gate * -ALPHA_OF_KERNELS))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def finish_tile(acc, bias, row, is_row, weights, pair, is_real, PARTS: tl.constexpr, CLAMPED: tl.constexpr):
    """
    From sums [rows of a weight, pairs of a tile] to what is stored: with biases, gates (the first half of the
    rows) applied to what they multiply if there are two PARTS, and multiplied by the pairs' weights.
    """
    if bias is not None:
        acc += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if PARTS == 2:
        halves = tl.reshape(acc, [2, acc.shape[0] // 2, acc.shape[1]])
        gate, up = tl.split(tl.permute(halves, [1, 2, 0]))
        acc = activate(gate, up, CLAMPED)
    if weights is not None:
        acc *= tl.load(weights + pair, mask=is_real, other=0.0)[None, :]
    return acc


@triton.jit
def find_tile(
    pairs, table, rows, BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    What a program multiplies, once its inputs are there: which of the BLOCKS of an expert's rows; the expert,
    or EXPERTS if there is no such tile; the pairs int64 [BLOCK_M], and which of them are real. Programs side
    by side share the pairs.
    """
    pdl_wait(OVERLAP)
    tile = tl.program_id(0) // BLOCKS
    each = tl.arange(0, EXPERTS_PAD)
    ends = tl.load(table + EXPERTS + each, mask=each < EXPERTS, other=2147483647)
    is_before = ends <= tile
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    begin = tl.max(tl.where(is_before, ends, 0), axis=0)
    member = (tile - begin) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_real = member < tl.load(table + expert, mask=expert < EXPERTS, other=0)
    pair = tl.load(pairs + expert.to(tl.int64) * rows + member, mask=is_real, other=0).to(tl.int64)
    return tl.program_id(0) % BLOCKS, expert, pair, is_real
