"""Matrix products, split over the tensor-parallel ranks by output features (columns) or input features
(rows).

A layer has a weight in some format, which lists the products that can multiply by it (weight.py). The layer
asks them in order which takes a step's rows. So a model says what it multiplies, never how.

Each parameter carries a `weight_loader` that takes this rank's shard out of the checkpoint's tensor by
slicing, so that no more than the shard is read from disk. Weights are [output features, input features].
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual_stream import Stream
from nanovllm.layers.weight import DenseWeight, Gated, Product, Shard, Weight
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import StoredTensor

Shards = dict[Any, Shard]


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator. Raises ValueError unless it is a whole number."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


_allocates: ContextVar[bool] = ContextVar("allocates", default=True)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Linear layers made here get their weights by `set_matrix`, when their names are known."""
    token = _allocates.set(False)
    try:
        yield
    finally:
        _allocates.reset(token)


class LinearBase(nn.Module):
    """
    `matrix` is the Weight, of this rank's size, whose parameters are the layer's own; and there may be a
    bias. `shards` are this rank's share of the checkpoint's matrices that it is made of, by the name
    (`shard_id`) under which they are loaded. `hidden_size` is that of the residual stream that it reads or
    adds to, None if it does neither.
    """

    def __init__(self, shards: Shards, bias: bool = False, hidden_size: int | None = None):
        super().__init__()
        self.group = get_group()
        self.shards = shards
        self.hidden_size = hidden_size
        self.bias = None
        if bias:
            num_rows = sum(shard.size[0] for shard in shards.values())
            self.bias = nn.Parameter(torch.zeros(num_rows), requires_grad=False)
            self.bias.weight_loader = self.weight_loader
        if _allocates.get():
            self.set_matrix(DenseWeight(shards))

    def set_matrix(self, matrix: Weight) -> None:
        """Register the weight's parameters, and list what multiplies by it."""
        self.matrix = matrix
        for name, tensor in matrix.parameters.items():
            tensor.weight_loader = None if matrix.stored else self.weight_loader
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
        self.products = matrix.products(self.hidden_size, self.group.size)

    def finish(self) -> None:
        """Once the weight is loaded: bring it into the layout that multiplies fastest."""
        self.matrix.finish()
        self.set_matrix(self.matrix)

    def product(self, rows: int) -> Product:
        """What multiplies so many rows in this step."""
        is_prefill = get_context().is_prefill
        return next(each for each in self.products if each.accepts(rows, is_prefill))

    def stored_tensors(self, name: str) -> dict[str, StoredTensor]:
        """What checkpoints have in place of the `weight` of the layer with this name."""
        return {
            f"{name}.{inner}": stored._replace(load=functools.partial(self._load_stored, stored.load))
            for inner, stored in self.matrix.stored.items()
            if inner != "bias" or self.bias is None
        }

    def _load_stored(
        self, load: Callable[[Any, Shard], None], loaded_weight: Any, shard_id: Any = None
    ) -> None:
        load(loaded_weight, self.shards[shard_id])

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any, shard_id: Any = None) -> None:
        self.shards[shard_id].load(param.data, loaded_weight)


class ReplicatedLinear(LinearBase):
    """Not split: every rank holds and computes all of it."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        super().__init__({None: Shard((output_size, input_size))}, bias)

    def forward(self, stream: Stream) -> Tensor:
        """norm(x) @ weight.T + bias for the stream's x and norm: [tokens, output features]."""
        return self.product(len(stream.x)).norm_linear(stream, self.bias)


class ColumnParallelLinear(LinearBase):
    """Split by output features; what comes out is this rank's part."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        self._build(input_size, {None: (output_size, 1)}, bias)

    def _build(self, input_size: int, matrices: dict[Any, tuple[int, int]], bias: bool) -> None:
        """
        From matrices one below the other: for each, its number of rows, and how many neighbouring ranks hold
        the same part of it.
        """
        group = get_group()
        shards: Shards = {}
        offset = 0
        for shard_id, (total, replicas) in matrices.items():
            num_rows = divide(total * replicas, group.size)
            start = group.rank // replicas * num_rows
            rows = slice(start, start + num_rows)
            shards[shard_id] = Shard((total, input_size), rows, offset=offset)
            offset += num_rows
        super().__init__(shards, bias, hidden_size=input_size)

    def forward(self, stream: Stream, silu_and_mul: bool = False) -> Tensor | Gated:
        """
        norm(x) @ weight.T + bias for the stream's x [tokens, input features] and norm: [tokens, output
        features of this rank]. With silu_and_mul the first half of these are gates, the second half is what
        they multiply, and the result has half as many, perhaps with the activation left to do.
        """
        return self.product(len(stream.x)).norm_linear(stream, self.bias, silu_and_mul)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices with the same input, one below the other, each split by output features."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False):
        matrices = {i: (size, 1) for i, size in enumerate(output_sizes)}
        self._build(input_size, matrices, bias)


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
        size = get_group().size
        total_num_kv_heads = total_num_kv_heads or total_num_heads
        replicas = max(1, size // total_num_kv_heads)
        heads = divide(total_num_heads, size), divide(total_num_kv_heads * replicas, size)
        query = total_num_heads * head_size, 1
        key = total_num_kv_heads * head_size, replicas
        self._build(hidden_size, {"q": query, "k": key, "v": key}, bias)
        self.num_heads, self.num_kv_heads = heads


class RowParallelLinear(LinearBase):
    """
    Split by input features, in front of a residual addition, which comes with the sum over the ranks. Rank 0
    alone adds the bias.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        group = get_group()
        width = divide(input_size, group.size)
        columns = slice(group.rank * width, group.rank * width + width)
        shard = Shard((output_size, input_size), columns=columns)
        super().__init__({None: shard}, bias, hidden_size=output_size)

    def add_to(self, stream: Stream, x: Tensor | Gated, next_norm: RMSNorm) -> Stream:
        """
        The stream plus x @ weight.T + bias, summed over the ranks, in front of the next norm. x [tokens,
        input features of this rank].
        """
        bias = self.bias if self.group.rank == 0 else None
        product = self.product(len(stream.x))
        if self.group.size > 1:
            return stream.add(product.linear(x, bias), next_norm)
        return product.linear_add(stream, x, bias, next_norm)
