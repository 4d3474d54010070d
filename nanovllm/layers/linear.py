"""Matrix products, split over the tensor-parallel ranks by output (columns) or input features (rows).

A layer has a `Weight` [output features, input features] in some format, which multiplies any number of rows
and may list faster products for some. The layer asks these in order which takes a step's rows. So a model
says what it multiplies, never how. Each parameter carries a `weight_loader` that takes this rank's shard out
of the checkpoint's tensor by slicing, so that no more than the shard is read from disk.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.distributed.group import get_group
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import default_weight_loader


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator. Raises ValueError unless it is a whole number."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


@dataclass
class Shard:
    """
    This rank's share of a checkpoint's matrix of this shape: `rows` and `columns` (None: all). `size` says
    how many these are, `place` which rows of the layer's own matrix.
    """

    shape: tuple[int, int]
    rows: slice | None = None
    columns: slice | None = None

    def __post_init__(self) -> None:
        self.rows = self.rows or slice(0, self.shape[0])
        self.columns = self.columns or slice(0, self.shape[1])
        self.size = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        self.place = slice(0, self.size[0])

    def load(self, param: Tensor, loaded: Any) -> None:
        """Copy it into the layer's own matrix, or bias."""
        dims = param.dim()
        default_weight_loader(param[self.place], loaded, (self.rows, self.columns)[:dims], self.shape[:dims])


def activated(x: Any) -> Tensor:
    """[tokens, width], from that or from a gated result in front of its activation."""
    return x if isinstance(x, Tensor) else x.activated()


class Product:
    """
    One way to multiply by a weight [out, in], which may fold in what stands around it in a decoder layer: the
    norm in front of it, the activation or the residual addition behind it. It may leave work half done for
    the product that follows: in a subclass of `Stream`, or as a gated result that is still to be `activated`.

    Subclasses have `multiply(x, bias=None)`, x [tokens, in] @ weight.T + bias, or another `linear`. With
    `gated` the first half of the outputs are gates, the second half is what they multiply, and the result has
    half as many.
    """

    act_fn = SiluAndMul()

    def accepts(self, rows: int, is_prefill: bool) -> bool:
        """Whether it works for so many rows and is preferred to what is listed behind it."""
        return True

    def linear(self, x: Any, bias: Tensor | None, gated: bool = False) -> Any:
        """x [tokens, in] @ weight.T + bias: [tokens, out]."""
        y = self.multiply(activated(x), bias=bias)
        return self.act_fn(y) if gated else y

    def norm_linear(self, stream: Stream, bias: Tensor | None, gated: bool = False) -> Any:
        """norm(x) @ weight.T + bias for the stream's x and norm: [tokens, out]."""
        return self.linear(stream.normalised(), bias, gated)

    def linear_add(self, stream: Stream, x: Any, bias: Tensor | None, next_norm: RMSNorm) -> Stream:
        """The stream plus x @ weight.T + bias, in front of the next norm. Asked for on one rank alone."""
        return stream.add(self.linear(x, bias), next_norm)


class Weight(Product):
    """
    A matrix [out, in] in some format, which these shards make up. `parameters` are its tensors, by name. As a
    product it takes any number of rows, with kernels of their own for the norm, the activation and the
    addition around it.
    """

    def __init__(self, shards: dict[Any, Shard]):
        *_, last = shards.values()
        self.shape = last.place.stop, last.size[1]

    def finish(self) -> None:
        """Called when all tensors are loaded: bring them into the layout that multiplies fastest here."""

    def products(self, layer: Any) -> list[Product]:
        """
        What multiplies by it faster than itself in this layer, in order of preference. Called when the layer
        gets the weight and again after `finish`.
        """
        return []


class DenseWeight(Weight):
    """`weight` [out, in], in the dtype of the model. It is loaded by the layer's `weight_loader`."""

    def __init__(self, shards: dict[Any, Shard]):
        super().__init__(shards)
        self.weight = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        self.parameters = {"weight": self.weight}

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)


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
        shards = {
            shard_id: Shard((size, input_size), own_part(size, head_size)) for shard_id, size in sizes.items()
        }
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
