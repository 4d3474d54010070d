"""Matrix products, split over the tensor-parallel ranks by output features (columns) or input features
(rows).

A layer has a weight in some format, which can multiply any number of rows and may list faster products for
some (weight.py). The layer asks these in order which takes a step's rows. So a model says what it multiplies,
never how.

Each parameter carries a `weight_loader` that takes this rank's shard out of the checkpoint's tensor by
slicing, so that no more than the shard is read from disk. Weights are [output features, input features].
"""

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from nanovllm.distributed.group import get_group
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual_stream import Stream
from nanovllm.layers.weight import DenseWeight, Product, Shard, Weight
from nanovllm.utils.context import get_context


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator. Raises ValueError unless it is a whole number."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


# Whether layers that are made have a dense weight. If not, `set_matrix` gives them one later.
has_weights = ContextVar("has_weights", default=True)


def own_part(size: int, head_size: int = 0) -> slice:
    """
    This rank's of so many features, if they are split over the ranks. Of heads of this size there may be
    fewer than ranks: then neighbouring ranks hold the same one.
    """
    group = get_group()
    replicas = max(1, group.size * head_size // size)
    width = divide(size * replicas, group.size)
    start = group.rank // replicas * width
    return slice(start, start + width)


class LinearBase(nn.Module):
    """
    `matrix` is the Weight, of this rank's size, whose parameters are the layer's own; and there may be a
    bias. `shards` are this rank's share of the checkpoint's matrices that it is made of, one below the other,
    by the name (`shard_id`) under which they are loaded. `hidden_size` is that of the residual stream that it
    reads or adds to, None if it does neither.
    """

    def __init__(self, shards: dict[Any, Shard], bias: bool = False, hidden_size: int | None = None):
        super().__init__()
        self.group = get_group()
        self.shards = shards
        self.hidden_size = hidden_size
        num_rows = 0
        for shard in shards.values():
            shard.place = slice(num_rows, num_rows + shard.size[0])
            num_rows = shard.place.stop
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(num_rows), requires_grad=False)
            self.bias.weight_loader = self.weight_loader
        if has_weights.get():
            self.set_matrix(DenseWeight(shards))

    def set_matrix(self, matrix: Weight) -> None:
        """Register the weight's parameters, and list what multiplies by it faster than itself."""
        self.matrix = matrix
        for name, tensor in matrix.parameters.items():
            tensor.weight_loader = self.weight_loader
            setattr(self, name, tensor)
        self.products = matrix.products(self)

    def finish(self) -> None:
        """Once the weight is loaded: bring it into the layout that multiplies fastest."""
        self.matrix.finish()
        self.set_matrix(self.matrix)

    def product(self, rows: int) -> Product:
        """What multiplies so many rows in this step."""
        is_prefill = get_context().is_prefill
        for product in self.products:
            if product.accepts(rows, is_prefill):
                return product
        return self.matrix

    def forward(self, stream: Stream, silu_and_mul: bool = False) -> Any:
        """
        norm(x) @ weight.T + bias for the stream's x [tokens, input features] and norm: [tokens, output
        features of this rank]. With silu_and_mul the first half of these are gates, the second half is what
        they multiply, and the result has half as many, perhaps with the activation left to do.
        """
        return self.product(len(stream.x)).norm_linear(stream, self.bias, silu_and_mul)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any, shard_id: Any = None) -> None:
        self.shards[shard_id].load(param, loaded_weight)


class ReplicatedLinear(LinearBase):
    """Not split: every rank holds and computes all of it."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        super().__init__({None: Shard((output_size, input_size))}, bias)


class ColumnParallelLinear(LinearBase):
    """Split by output features; what comes out is this rank's part."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        self._build(input_size, {None: output_size}, bias)

    def _build(self, input_size: int, sizes: dict[Any, int], bias: bool, head_size: int = 0) -> None:
        """From matrices with so many rows, one below the other."""
        shards = {}
        for shard_id, size in sizes.items():
            shards[shard_id] = Shard((size, input_size), own_part(size, head_size))
        super().__init__(shards, bias, input_size)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices with the same input, one below the other, each split by output features."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False):
        self._build(input_size, dict(enumerate(output_sizes)), bias)


class QKVParallelLinear(ColumnParallelLinear):
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
        kv_size = (total_num_kv_heads or total_num_heads) * head_size
        sizes = {"q": total_num_heads * head_size, "k": kv_size, "v": kv_size}
        self._build(hidden_size, sizes, bias, head_size)
        self.num_heads = divide(self.shards["q"].size[0], head_size)
        self.num_kv_heads = divide(self.shards["k"].size[0], head_size)


class RowParallelLinear(LinearBase):
    """
    Split by input features, in front of a residual addition (`add_to`), which comes with the sum over the
    ranks. Rank 0 alone adds the bias.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        shard = Shard((output_size, input_size), columns=own_part(input_size))
        super().__init__({None: shard}, bias, output_size)

    def add_to(self, stream: Stream, x: Any, next_norm: RMSNorm) -> Stream:
        """
        The stream plus x @ weight.T + bias, summed over the ranks, in front of the next norm. x [tokens,
        input features of this rank].
        """
        bias = self.bias if self.group.rank == 0 else None
        product = self.product(len(stream.x))
        if self.group.size > 1:
            return stream.add(product.linear(x, bias), next_norm)
        return product.linear_add(stream, x, bias, next_norm)
