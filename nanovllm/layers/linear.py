"""Matrix products, split over the tensor-parallel ranks by output features (columns) or input features
(rows).

Each parameter carries a `weight_loader` that takes this rank's shard out of the checkpoint's tensor by
slicing, so that no more than the shard is read from disk. Weights are [output features, input features].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.distributed import group
from nanovllm.utils.loader import default_weight_loader


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator. Raises ValueError unless it is a whole number."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


class LinearBase(nn.Module):
    """A weight of this rank's size and, if wanted, a bias; subclasses say how checkpoints are cut to fit."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.weight.weight_loader = self.weight_loader
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_size), requires_grad=False)
            self.bias.weight_loader = self.weight_loader
        else:
            self.register_parameter("bias", None)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, input features] -> [tokens, output features of this rank]."""
        return F.linear(x, self.weight, self.bias)


class ReplicatedLinear(LinearBase):
    """Not split: every rank holds and computes all of it."""

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any) -> None:
        default_weight_loader(param, loaded_weight)


class MergedColumnParallelLinear(LinearBase):
    """Several matrices with the same input, one below the other, each split by output features."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False):
        self.output_sizes = output_sizes
        super().__init__(input_size, sum(divide(size, group.tp_size()) for size in output_sizes), bias)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any, shard_id: int = 0) -> None:
        size = self.output_sizes[shard_id]
        self._load_rows(param, loaded_weight, size, sum(self.output_sizes[:shard_id]) // group.tp_size())

    def _load_rows(
        self, param: nn.Parameter, loaded_weight: Any, total: int, offset: int, parts: int = 0, part: int = -1
    ) -> None:
        """
        Copy one of `parts` equal parts of the `total` rows of `loaded_weight` to the parameter's rows at
        `offset`.
        """
        expected = (total, *param.shape[1:])
        if tuple(loaded_weight.shape) != expected:
            raise ValueError(f"shape {tuple(loaded_weight.shape)}, expected {expected}")
        parts, part = parts or group.tp_size(), group.tp_rank() if part < 0 else part
        rows = divide(total, parts)
        default_weight_loader(
            param.data[offset : offset + rows], loaded_weight[part * rows : (part + 1) * rows]
        )


class ColumnParallelLinear(MergedColumnParallelLinear):
    """Split by output features; what comes out is this rank's part."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        super().__init__(input_size, [output_size], bias)


class QKVParallelLinear(MergedColumnParallelLinear):
    """
    Query, key and value projections as one matrix, split by heads. With fewer KV heads than ranks,
    neighbouring ranks hold the same KV head.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = False,
    ):
        size = group.tp_size()
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
        parts = group.tp_size() // self.num_kv_replicas
        part = group.tp_rank() // self.num_kv_replicas
        self._load_rows(param, loaded_weight, self.total_num_kv_heads * self.head_size, offset, parts, part)


class RowParallelLinear(LinearBase):
    """
    Split by input features; the ranks' partial products are summed, here or, without `reduce`, by the norm
    that follows. Rank 0 alone adds the bias.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False, reduce: bool = True):
        self.input_size = input_size
        self.reduce = reduce
        super().__init__(divide(input_size, group.tp_size()), output_size, bias)
        self.adds_bias = group.tp_rank() == 0
        self.group = group.get_group()

    @property
    def bias_here(self) -> torch.Tensor | None:
        """What this rank adds to its part of the sum."""
        return self.bias if self.adds_bias else None

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any) -> None:
        if param.dim() == 1:  # the bias
            default_weight_loader(param, loaded_weight)
            return
        expected = (param.shape[0], self.input_size)
        if tuple(loaded_weight.shape) != expected:
            raise ValueError(f"shape {tuple(loaded_weight.shape)}, expected {expected}")
        start = group.tp_rank() * param.shape[1]
        default_weight_loader(param, loaded_weight[:, start : start + param.shape[1]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, input features of this rank] -> [tokens, output features], with `reduce` complete."""
        y = F.linear(x, self.weight, self.bias_here)
        return self.group.all_reduce(y) if self.reduce else y
