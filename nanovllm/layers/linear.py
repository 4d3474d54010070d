"""Matrix products, split over the tensor-parallel ranks by output features (columns) or input features
(rows), and the choice of who computes them.

A product of a weight that is not quantised is computed by one of three: for one or two rows by a
matrix-vector kernel, for a decode batch of a small model by a kernel that has its neighbours folded in, and
else by torch's library. A prefill always uses the library, so that a start compiles one way only. A quantised
weight multiplies itself (layers/quantization), perhaps by input that is quantised too.

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
from nanovllm.kernels.fp8_linear import quantise
from nanovllm.kernels.fused_linear import can_fuse, fused_linear
from nanovllm.layers.activation import Gates, SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.quantization.plain import Plain
from nanovllm.layers.quantization.scaled import Part, matrix_shape
from nanovllm.layers.quantization.scheme import Scheme
from nanovllm.layers.residual_stream import Stream
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import StoredTensor, default_weight_loader


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator. Raises ValueError unless it is a whole number."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


_allocates: ContextVar[bool] = ContextVar("allocates", default=True)


@contextlib.contextmanager
def without_formats() -> Iterator[None]:
    """Linear layers made here get their weights by `assign_formats`, when their names are known."""
    token = _allocates.set(False)
    try:
        yield
    finally:
        _allocates.reset(token)


def assign_formats(model: nn.Module, scheme: Scheme | None) -> None:
    """
    Give each linear layer its weight, in the format that the scheme has for its names in a checkpoint. Raises
    ValueError if the parts of a merged one have different formats.
    """
    merged: dict[str, list[str]] = {}
    for source, (target, _) in model.packed_modules_mapping.items():
        merged.setdefault(target, []).append(source)
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        names = layer.names_in_checkpoint(name, merged)
        first, *others = formats = [scheme and layer.is_quantisable and scheme.find(each) for each in names]
        if any(other != first for other in others):
            stored = (f"{n}: {f or 'not quantised'}" for n, f in zip(names, formats, strict=True))
            own = name.rpartition(".")[2]
            raise ValueError(f"{own} needs one format for all its parts, got {'; '.join(stored)}")
        layer.set_format(first.kind(layer.parts, **first.settings) if first else Plain(layer.parts))


class LinearBase(nn.Module):
    """
    A matrix of this rank's size in some format, and, if wanted, a bias. `parts` are the checkpoint's matrices
    that it is made of, by the name (`shard_id`) under which they are loaded.
    """

    is_quantisable = True

    def __init__(self, parts: dict[Any, Part], bias: bool = False):
        super().__init__()
        self.group = get_group()
        self.parts = parts
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(matrix_shape(parts)[0]), requires_grad=False)
            self.bias.weight_loader = self.weight_loader
        if _allocates.get():
            self.set_format(Plain(parts))

    def set_format(self, format: Any) -> None:
        """Keep the weight in this format of layers/quantization."""
        self.format = format
        self.is_plain = isinstance(format, Plain)
        for name, param in format.parameters.items():
            # Other formats load tensors that differ from their parameters, see `stored_tensors`.
            param.weight_loader = self.weight_loader if self.is_plain else None
            self.register_parameter(name, param)

    def pack(self) -> None:
        """Once the weight is loaded: bring it into the layout that multiplies fastest."""
        if self.is_plain:
            self.format.pack()
            self.weight = self.format.weight

    def names_in_checkpoint(self, name: str, merged: dict[str, list[str]]) -> list[str]:
        """The names of the matrices that make up the layer with this name; `merged` has those of some."""
        parent, _, own = name.rpartition(".")
        return [f"{parent}.{source}" for source in merged.get(own, [own])]

    def stored_tensors(self, name: str) -> dict[str, StoredTensor]:
        """What checkpoints have in place of the `weight` of the layer with this name."""
        return {
            f"{name}.{inner}": stored._replace(load=functools.partial(self._load_stored, stored.load))
            for inner, stored in self.format.stored.items()
            if inner != "bias" or self.bias is None
        }

    def _load_stored(
        self, load: Callable[[Any, Part], None], loaded_weight: Any, shard_id: Any = None
    ) -> None:
        load(loaded_weight, self.parts[shard_id])

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any, shard_id: Any = None) -> None:
        part = self.parts[shard_id]
        cut = (part.rows, part.columns)[: param.dim()]
        cut, shape = cut if len(cut) > 1 else cut[0], part.shape[: param.dim()]
        default_weight_loader(param.data[part.place], loaded_weight, cut, shape)

    def _uses_matvec(self, x: Tensor) -> bool:
        return not get_context().is_prefill and self.format.can_use_matvec(x)

    def _is_fused(self, residual: Tensor) -> bool:
        """Whether the product beside this residual takes the addition to it, or its norm, into its kernel."""
        if not self.is_plain or get_context().is_prefill or self.group.size > 1:
            return False
        return can_fuse(residual, self.weight)


class ReplicatedLinear(LinearBase):
    """Not split: every rank holds and computes all of it."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        super().__init__({None: Part((output_size, input_size))}, bias)

    def forward(self, stream: Stream) -> Tensor:
        """norm(x) @ weight.T + bias for the stream's x and norm: [tokens, output features]."""
        if stream.is_untouched and self._uses_matvec(stream.x):
            return self.format.matvec(stream.x, self.bias, stream.norm.weight, eps=stream.norm.eps)
        return self.format.multiply(stream.normalised(), self.bias)


class ColumnParallelLinear(LinearBase):
    """Split by output features; what comes out is this rank's part."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        self._build(input_size, {None: (output_size, 1)}, bias)

    def _build(self, input_size: int, matrices: dict[Any, tuple[int, int]], bias: bool) -> None:
        """
        From matrices one below the other: for each, its number of rows, and how many neighbouring ranks hold
        the same part of it.
        """
        group, parts, offset = get_group(), {}, 0
        for shard_id, (total, replicas) in matrices.items():
            rows = divide(total * replicas, group.size)
            start = group.rank // replicas * rows
            parts[shard_id] = Part((total, input_size), slice(start, start + rows), offset=offset)
            offset += rows
        super().__init__(parts, bias)
        self.act_fn = SiluAndMul()

    def forward(self, stream: Stream, silu_and_mul: bool = False) -> Tensor | Gates:
        """
        norm(x) @ weight.T + bias for the stream's x [tokens, input features] and norm: [tokens, output
        features of this rank]. With silu_and_mul the first half of these are gates, the second half is what
        they multiply, and the result has half as many; or it is `Gates`, where that is left to the product
        that follows.
        """
        options = {"eps": stream.norm.eps, "silu_and_mul": silu_and_mul}
        if self._uses_matvec(stream.x):
            if stream.is_untouched:
                return self.format.matvec(stream.x, self.bias, stream.norm.weight, **options)
            return self.format.matvec(stream.normalised(), self.bias, **options)
        if self._is_fused(stream.x):
            scaled = stream.normalised() if stream.squares is None else stream.scaled
            return fused_linear(scaled, self.weight, self.bias, stream.squares, **options)[0]
        group = self.format.activation_group(stream.x)
        if group is not None:
            y = self.format.multiply(stream.quantised(group), self.bias, leave_scales=silu_and_mul)
            return Gates(y) if silu_and_mul else y
        y = self.format.multiply(stream.normalised(), self.bias)
        return self.act_fn(y) if silu_and_mul else y


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices with the same input, one below the other, each split by output features."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False):
        self._build(input_size, {i: (size, 1) for i, size in enumerate(output_sizes)}, bias)


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
        total_num_kv_heads = total_num_kv_heads or total_num_heads
        num_kv_replicas = max(1, size // total_num_kv_heads)
        num_heads = divide(total_num_heads, size)
        num_kv_heads = divide(total_num_kv_heads * num_kv_replicas, size)
        key = total_num_kv_heads * head_size, num_kv_replicas
        self._build(hidden_size, {"q": (total_num_heads * head_size, 1), "k": key, "v": key}, bias)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads


class RowParallelLinear(LinearBase):
    """
    Split by input features, in front of a residual addition, which comes with the sum over the ranks. Rank 0
    alone adds the bias.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False):
        group = get_group()
        width = divide(input_size, group.size)
        columns = slice(group.rank * width, group.rank * width + width)
        super().__init__({None: Part((output_size, input_size), columns=columns)}, bias)

    def add_to(
        self, stream: Stream, x: Tensor | Gates, next_norm: RMSNorm, own_norm: RMSNorm | None = None
    ) -> Stream:
        """
        The stream plus x @ weight.T + bias, summed over the ranks, in front of the next norm. x [tokens,
        input features of this rank]. With a norm of its own the product is normalised before it is added.
        """
        bias = self.bias if self.group.rank == 0 else None
        is_alone = self.group.size == 1 and own_norm is None  # nothing is done between product and addition
        uses_matvec = self._uses_matvec(stream.x)
        group = None if uses_matvec else self.format.activation_group(stream.x)
        if group is not None:
            rows = x.quantised(group) if isinstance(x, Gates) else quantise(x, group)
            y = self.format.multiply(rows, bias, leave_scales=is_alone)
            if own_norm is None:
                return Stream(stream.x, next_norm, added=y)
        else:
            x = x.activated() if isinstance(x, Gates) else x
            if uses_matvec and is_alone:
                return Stream(self.format.matvec(x, bias, residual=stream.x), next_norm)
            if is_alone and self._is_fused(stream.x):
                total, scaled, squares = fused_linear(
                    x, self.weight, bias, residual=stream.x, next_norm_weight=next_norm.weight
                )
                return Stream(total, next_norm, scaled, squares)
            y = self.format.matvec(x, bias) if uses_matvec else self.format.multiply(x, bias)
        if own_norm is not None:
            return Stream(stream.x + own_norm(self.group.all_reduce(y)), next_norm)
        normed, total = next_norm(y, stream.x)
        return Stream(total, next_norm, normed)
