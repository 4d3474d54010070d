"""Matrix products, split over the tensor-parallel ranks by output features (columns) or input features
(rows), and the choice of who computes them.

A product is computed by one of three: for one or two rows by a matrix-vector kernel, for a decode batch of a
small model by a kernel that has its neighbours folded in, and else by torch's library. A prefill always uses
the library, so that a start compiles one way only.

Each parameter carries a `weight_loader` that takes this rank's shard out of the checkpoint's tensor by
slicing, so that no more than the shard is read from disk. Weights are [output features, input features].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.distributed.group import get_group
from nanovllm.kernels.fused_linear import can_fuse, fused_linear
from nanovllm.kernels.matvec import can_use_matvec, linear_small
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual_stream import Stream
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import default_weight_loader


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator. Raises ValueError unless it is a whole number."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


class LinearBase(nn.Module):
    """
    A weight of this rank's size and, if wanted, a bias. Subclasses say how checkpoints are cut to fit, in
    `weight_loader`.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        super().__init__()
        self.group = get_group()
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(output_size), requires_grad=False) if bias else None
        for param in self.parameters():
            param.weight_loader = self.weight_loader

    def _uses_matvec(self, x: torch.Tensor) -> bool:
        return not get_context().is_prefill and can_use_matvec(x)

    def _is_fused(self, residual: torch.Tensor) -> bool:
        """Whether the product beside this residual takes the addition to it, or its norm, into its kernel."""
        return not get_context().is_prefill and self.group.size == 1 and can_fuse(residual, self.weight)


class ReplicatedLinear(LinearBase):
    """Not split: every rank holds and computes all of it."""

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any) -> None:
        default_weight_loader(param, loaded_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, input features] -> [tokens, output features]."""
        return F.linear(x, self.weight, self.bias)


class ColumnParallelLinear(LinearBase):
    """Split by output features; what comes out is this rank's part."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        self.total_output_size = output_size
        super().__init__(input_size, divide(output_size, get_group().size), bias)
        self.act_fn = SiluAndMul()

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any) -> None:
        self._load_rows(param, loaded_weight, self.total_output_size, 0)

    def _load_rows(
        self, param: nn.Parameter, loaded_weight: Any, total: int, offset: int, replicas: int = 1
    ) -> None:
        """
        Copy this rank's part of the `total` rows of `loaded_weight` to the parameter's rows at `offset`. Each
        part goes to `replicas` neighbouring ranks.
        """
        rows = divide(total * replicas, self.group.size)
        start = self.group.rank // replicas * rows
        part, shape = slice(start, start + rows), (total, *param.shape[1:])
        default_weight_loader(param.data[offset : offset + rows], loaded_weight, part, shape)

    def forward(self, stream: Stream, silu_and_mul: bool = False) -> torch.Tensor:
        """
        norm(x) @ weight.T + bias for the stream's x [tokens, input features] and norm: [tokens, output
        features of this rank]. With silu_and_mul the first half of these are gates, the second half is what
        they multiply, and the result has half as many.
        """
        options = {"eps": stream.norm.eps, "silu_and_mul": silu_and_mul}
        if self._uses_matvec(stream.x):
            if stream.scaled is None:
                return linear_small(stream.x, self.weight, self.bias, stream.norm.weight, **options)
            return linear_small(stream.normalised(), self.weight, self.bias, **options)
        if self._is_fused(stream.x):
            scaled = stream.normalised() if stream.squares is None else stream.scaled
            return fused_linear(scaled, self.weight, self.bias, stream.squares, **options)[0]
        y = F.linear(stream.normalised(), self.weight, self.bias)
        return self.act_fn(y) if silu_and_mul else y


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices with the same input, one below the other, each split by output features."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False):
        for size in output_sizes:  # each, not only their sum, must be divisible
            divide(size, get_group().size)
        self.output_sizes = output_sizes
        super().__init__(input_size, sum(output_sizes), bias)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any, shard_id: int = 0) -> None:
        offset = sum(self.output_sizes[:shard_id]) // self.group.size
        self._load_rows(param, loaded_weight, self.output_sizes[shard_id], offset)


class QKVParallelLinear(MergedColumnParallelLinear):
    """
    Query, key and value projections as one matrix, split by heads. With fewer KV heads than ranks,
    neighbouring ranks hold the same KV head.
    """

    def __init__(
        self, hidden_size: int, head_size: int,
        total_num_heads: int, total_num_kv_heads: int | None = None, bias: bool = False,
    ):  # fmt: skip
        size = get_group().size
        self.head_size = head_size
        self.total_num_kv_heads = total_num_kv_heads or total_num_heads
        self.num_heads = divide(total_num_heads, size)
        self.num_kv_replicas = max(1, size // self.total_num_kv_heads)
        self.num_kv_heads = divide(self.total_num_kv_heads * self.num_kv_replicas, size)
        # sizes over all ranks, replicas counted
        kv_size = self.num_kv_heads * size * head_size
        super().__init__(hidden_size, [total_num_heads * head_size, kv_size, kv_size], bias)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any, shard_id: str = "q") -> None:
        if shard_id == "q":
            super().weight_loader(param, loaded_weight, 0)
            return
        offset = (self.num_heads + (self.num_kv_heads if shard_id == "v" else 0)) * self.head_size
        total = self.total_num_kv_heads * self.head_size
        self._load_rows(param, loaded_weight, total, offset, self.num_kv_replicas)


class RowParallelLinear(LinearBase):
    """
    Split by input features, in front of a residual addition, which comes with the sum over the ranks. Rank 0
    alone adds the bias.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        self.input_size = input_size
        super().__init__(divide(input_size, get_group().size), output_size, bias)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any) -> None:
        if param.dim() == 1:  # the bias
            default_weight_loader(param, loaded_weight)
            return
        rows, width = param.shape
        start = self.group.rank * width
        part = slice(None), slice(start, start + width)
        default_weight_loader(param, loaded_weight, part, (rows, self.input_size))

    def add_to(self, stream: Stream, x: torch.Tensor, next_norm: RMSNorm) -> Stream:
        """
        The stream plus x @ weight.T + bias, summed over the ranks, in front of the next norm. x [tokens,
        input features of this rank].
        """
        bias = self.bias if self.group.rank == 0 else None
        if self._uses_matvec(x) and self.group.size == 1:
            return Stream(linear_small(x, self.weight, bias, residual=stream.x), next_norm)
        if self._is_fused(stream.x):
            total, scaled, squares = fused_linear(
                x, self.weight, bias, residual=stream.x, next_norm_weight=next_norm.weight
            )
            return Stream(total, next_norm, scaled, squares)
        multiply = linear_small if self._uses_matvec(x) else F.linear
        normed, total = next_norm(multiply(x, self.weight, bias), stream.x)
        return Stream(total, next_norm, normed)
