"""Tensors that a model has under other names than a file, or that are made of those of a file.

And tensors that no model needs.
"""

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Old versions of transformers saved the first two; here they follow from the configuration. The others are
# for a KV cache of 8 bits.
IGNORED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".self_attn.k_scale", ".self_attn.v_scale")


@dataclass
class MadeTensor:
    """A value in place of a tensor of a file; errors name the file."""

    file: str
    name: str
    value: torch.Tensor

    def __post_init__(self) -> None:
        self.shape, self.dtype = tuple(self.value.shape), self.value.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.value[index]


def with_names_of(tensors: Iterable[Any], model: nn.Module, known: Collection[str]) -> Iterator[Any]:
    """
    Tensors by the model's `known` names, without those that no model needs. Files of the layers alone have
    names without "model.". A tied weight may be stored under its first name, under the second, or under both.
    Raises ValueError if these differ. A model whose tensors are made of others has `converted`, and one that
    calls parts of their names otherwise has `renamed_parts`.
    """
    if hasattr(model, "converted"):
        tensors = model.converted(tensors, known)
    tied, found = tied_names(model), {}
    for tensor in tensors:
        name = own_name(tensor.name, model, known)
        name = tied.get(name, name)
        if name in tied.values():
            other = found.setdefault(name, tensor)
            if other is not tensor:
                if not torch.equal(other[...], tensor[...]):
                    raise ValueError(
                        f"{tensor.file}: tensor {other.name} differs from {tensor.name}, to which it is "
                        "tied; hf_overrides={'tie_word_embeddings': False} loads both"
                    )
                continue
        if name in known or not name.endswith(IGNORED):
            yield renamed(tensor, name)


def own_name(name: str, model: nn.Module, known: Collection[str]) -> str:
    """What the model calls a tensor that has this name in files."""
    for theirs, ours in getattr(model, "renamed_parts", {}).items():
        name = name.replace(theirs, ours)
    is_without = name not in known and f"model.{name}" in known
    return f"model.{name}" if is_without else name


def tied_names(model: nn.Module) -> dict[str, str]:
    """The other names of tied weights -> their first ones."""
    firsts = {param: name for name, param in model.named_parameters()}
    every_name = model.named_parameters(remove_duplicate=False)
    return {name: firsts[param] for name, param in every_name if firsts[param] != name}


def renamed(tensor: Any, name: str) -> Any:
    tensor = copy.copy(tensor)
    tensor.name = name
    return tensor
