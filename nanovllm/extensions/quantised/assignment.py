"""Gives the linear layers of a model their weights, in the formats that the checkpoint has."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from nanovllm.extensions.quantised.scheme import Scheme
from nanovllm.layers.linear import LinearBase, Weight, has_weights
from nanovllm.utils.loader import StoredTensor


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Linear layers made here get their weights when their names are known."""
    token = has_weights.set(False)
    try:
        yield
    finally:
        has_weights.reset(token)


def assign_weights(model: nn.Module, scheme: Scheme | None, dense: Callable[..., Weight]) -> None:
    """
    `dense` makes the weights that are not quantised, of a layer's shards; without a scheme these are all.
    Raises ValueError if the scheme cannot be applied.
    """
    stacked = [name for name, param in model.named_parameters() if param.dim() > 2]  # by transformers
    if scheme is not None and stacked:
        raise ValueError(f"{stacked[0]} cannot be quantised: only experts that are plain SwiGLU networks can")
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        if scheme is None or not getattr(layer, "is_quantisable", True):
            weight = dense(layer.shards)
        else:
            sources = names_in_checkpoint(layer, name, model.packed_modules_mapping)
            weight = scheme.make_weight(dense, layer, name, sources)
        set_weight(layer, weight)


def set_weight(layer: LinearBase, weight: Weight) -> None:
    """
    Give the layer this weight. What loads a shard is in `stored`, functions of (tensor, Shard), by the names
    that checkpoints have for the weight's tensors; a dense weight has no such names.
    """
    layer.set_matrix(weight)
    if hasattr(weight, "stored") and not hasattr(layer, "stored_tensors"):
        for param in weight.parameters.values():
            param.weight_loader = None  # see `stored_tensors`
        layer.stored_tensors = functools.partial(stored_tensors, layer)


def stored_tensors(layer: LinearBase, name: str) -> dict[str, StoredTensor]:
    """What checkpoints have in place of the `weight` of the layer with this name."""
    found = {}
    for inner, stored in layer.matrix.stored.items():

        def load(loaded_weight: Any, shard_id: Any = None, load: Any = stored.load) -> None:
            load(loaded_weight, layer.shards[shard_id])

        if inner != "bias" or layer.bias is None:
            found[f"{name}.{inner}"] = stored._replace(load=load)
    return found


def names_in_checkpoint(layer: LinearBase, name: str, packed: dict[str, tuple[str, Any]]) -> list[str]:
    """The names of the matrices that make up this layer; `packed` says in which one others are."""
    if hasattr(layer, "names_in_checkpoint"):
        return layer.names_in_checkpoint(name)
    parent, _, own = name.rpartition(".")
    sources = [source for source, (target, _) in packed.items() if target == own]
    return [f"{parent}.{source}" for source in sources or [own]]
