"""Fills a model's parameters with a checkpoint's tensors.

Each parameter's `weight_loader` decides which part of a tensor goes where. A tensor without a place and a
parameter without a tensor are errors: a model never runs with missing weights.
"""

import copy
import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.checkpoints.folder import FolderCheckpoint

# Old versions of transformers saved the first two; here they follow from the configuration. The others are
# for a KV cache of 8 bits.
IGNORED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".self_attn.k_scale", ".self_attn.v_scale")
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def default_weight_loader(
    param: Tensor, loaded_weight: Any, part: Any = ..., shape: tuple[int, ...] | None = None
) -> None:
    """
    Copy a part of `loaded_weight`, which gives a tensor when sliced. Raises ValueError on a shape of the
    whole that is not `shape` (the parameter's, unless given), and on a weight that is not finite, or not any
    more in the parameter's dtype.
    """
    check_stored(loaded_weight, tuple(param.shape) if shape is None else shape)
    param.data.copy_(loaded_weight[part])
    check_finite(param.data)


def check_stored(loaded_weight: Any, shape: tuple[int, ...], dtypes: set[torch.dtype] = FLOATS) -> None:
    """Raise ValueError on another shape, and on a dtype that is none of these."""
    if tuple(loaded_weight.shape) != shape:
        raise ValueError(f"shape {tuple(loaded_weight.shape)}, expected {shape}")
    if loaded_weight.dtype is not None and loaded_weight.dtype not in dtypes:  # None: becomes float32
        raise ValueError(f"dtype {loaded_weight.dtype}, expected {' or '.join(sorted(map(str, dtypes)))}")


def check_finite(values: Tensor) -> None:
    # The sum is finite only if all weights are, and takes a few percent of loading; `isfinite` takes several
    # times as long. Where the sum of finite weights overflows, the slower test decides.
    if not math.isfinite(values.sum()) and not all(map(math.isfinite, values.aminmax())):
        raise ValueError(f"holds NaN, infinity, or a number too large for {values.dtype}")


class StoredTensor(NamedTuple):
    """A tensor that checkpoints have: what loads it, and whether it may be missing."""

    load: Callable[..., None]
    is_optional: bool = False


@torch.no_grad()
def load_model(model: nn.Module, path: str | os.PathLike | Checkpoint) -> None:
    """
    Fill every parameter of `model`, on the device and with the dtype that it has, from a checkpoint or a
    folder of one. Raises ValueError naming file and tensor.
    """
    is_path = isinstance(path, str | os.PathLike)
    checkpoint = FolderCheckpoint(os.path.expanduser(path)) if is_path else path
    if checkpoint.fill is not None:
        checkpoint.fill(model)
        return
    checkpoint.device = next(model.parameters()).device
    places = find_places(model)
    waiting = dict(places)
    # With another default device, whole tensors would be copied to it before they are sliced.
    with torch.device("cpu"):
        for tensor in read_tensors(checkpoint, model, places):
            source = f"{tensor.file}: tensor {tensor.name}"
            if tensor.name not in places:
                raise ValueError(f"{source} has no place in {type(model).__name__}")
            if tensor.name not in waiting:
                raise ValueError(f"{source} comes a second time")
            try:
                waiting.pop(tensor.name).load(tensor)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
    if missing := [name for name, place in waiting.items() if not place.is_optional]:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(f"{checkpoint.path} has no tensor {missing[0]}{more}")


def find_places(model: nn.Module) -> dict[str, StoredTensor]:
    """
    Each tensor that the model takes, by its name in a checkpoint. Several may be parts of one parameter, as
    `packed_modules_mapping` says. A layer whose checkpoints have other tensors than it has parameters says so
    in `stored_tensors`; those parameters have None as `weight_loader`.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    found = {}
    for name, param in model.named_parameters():
        loader = getattr(param, "weight_loader", default_weight_loader)
        if loader is not None:
            found[name] = StoredTensor(functools.partial(loader, param))
    for name, layer in model.named_modules():
        if hasattr(layer, "stored_tensors"):
            found |= layer.stored_tensors(name)
    places = {}
    for name, place in found.items():
        sources = [source for source, (target, _) in packed.items() if f".{target}." in f".{name}."]
        if not sources:
            places[name] = place
        for source in sources:
            target, shard_id = packed[source]
            source_name = f".{name}.".replace(f".{target}.", f".{source}.").strip(".")
            places[source_name] = place._replace(load=functools.partial(place.load, shard_id=shard_id))
    return places


def read_tensors(checkpoint: Checkpoint, model: nn.Module, known: Collection[str]) -> Iterable[Any]:
    """The checkpoint's tensors by the `known` names, with all changes that model and checkpoint ask for."""
    tensors = checkpoint.tensors()
    if hasattr(model, "converted"):
        tensors = model.converted(tensors)
    firsts = {param: name for name, param in model.named_parameters()}
    every_name = model.named_parameters(remove_duplicate=False)
    tied = {name: firsts[param] for name, param in every_name if firsts[param] != name}
    tensors = with_names_of(tensors, known, tied)
    for change in checkpoint.changes:
        tensors = change(tensors, tied.values())
    return tensors


def with_names_of(tensors: Iterable[Any], known: Collection[str], tied: dict[str, str]) -> Iterator[Any]:
    """
    Tensors by the model's `known` names, without those that no model needs. Files of the layers alone have
    names without "model.". A tied weight may be stored under its first name, under the second, of which
    `tied` has the first, or under both. Raises ValueError if these differ.
    """
    firsts, seconds = {}, []
    for tensor in tensors:
        if tensor.name not in known and f"model.{tensor.name}" in known:
            tensor = renamed(tensor, f"model.{tensor.name}")
        if tensor.name in tied:
            seconds.append(tensor)
            continue
        if tensor.name in tied.values():
            firsts[tensor.name] = tensor
        if tensor.name in known or not tensor.name.endswith(IGNORED):
            yield tensor
    for tensor in seconds:
        first = tied[tensor.name]
        if first not in firsts:
            firsts[first] = renamed(tensor, first)
            yield firsts[first]
        elif not torch.equal(firsts[first][...], tensor[...]):
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} differs from {first}, to which it is tied; "
                "hf_overrides={'tie_word_embeddings': False} loads both"
            )


def renamed(tensor: Any, name: str) -> Any:
    tensor = copy.copy(tensor)
    tensor.name = name
    return tensor
