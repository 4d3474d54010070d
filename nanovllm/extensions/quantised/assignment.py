"""Gives the linear layers of a model their weights, in the formats that the checkpoint has."""

from collections.abc import Callable

from torch import nn

from nanovllm.extensions.quantised.scheme import Scheme
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.weight import Weight


def assign_weights(model: nn.Module, scheme: Scheme | None, dense: Callable[..., Weight]) -> None:
    """
    `dense` makes the weights that are not quantised, of a layer's shards; without a scheme these are all.
    Raises ValueError if the scheme cannot be applied.
    """
    stacked = [name for name, param in model.named_parameters() if param.dim() > 2]  # by transformers
    if scheme is not None and stacked:
        raise ValueError(f"{stacked[0]} cannot be quantised, as experts can only in classes of this project")
    merged: dict[str, list[str]] = {}
    for source, (target, _) in model.packed_modules_mapping.items():
        merged.setdefault(target, []).append(source)
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        if scheme is None:
            weight = dense(layer.shards)
        else:
            weight = scheme.make_weight(dense, layer, name, names_in_checkpoint(layer, name, merged))
        layer.set_matrix(weight)


def names_in_checkpoint(layer: LinearBase, name: str, merged: dict[str, list[str]]) -> list[str]:
    """The names of the matrices that make up this layer; `merged` has those of some, by the layer's own."""
    if hasattr(layer, "names_in_checkpoint"):
        return layer.names_in_checkpoint(name)
    parent, _, own = name.rpartition(".")
    return [f"{parent}.{source}" for source in merged.get(own, [own])]
