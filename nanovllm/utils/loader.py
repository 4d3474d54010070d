"""Fills a model's parameters with a checkpoint's tensors.

Each parameter's `weight_loader` decides which part of a tensor goes where. A tensor without a place and a
parameter without a tensor are errors: a model never runs with missing weights.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.checkpoints.folder import DTYPES, Checkpoint, FolderCheckpoint

FLOATS = {*DTYPES.values()}


def default_weight_loader(
    param: Tensor, loaded_weight: Any, part: Any = ..., shape: tuple[int, ...] = ()
) -> None:
    """
    Copy a part of `loaded_weight`, which gives a tensor when sliced. Raises ValueError on a shape of the
    whole that is not `shape` (the parameter's, unless given), and on a weight that is not finite, or not any
    more in the parameter's dtype.
    """
    check_stored(loaded_weight, shape or tuple(param.shape))
    param.copy_(loaded_weight[part])
    check_finite(param)


def check_stored(loaded_weight: Any, shape: tuple[int, ...], dtypes: set[torch.dtype] = FLOATS) -> None:
    """Raise ValueError on another shape, and on a dtype that is none of these."""
    if tuple(loaded_weight.shape) != shape:
        raise ValueError(f"shape {tuple(loaded_weight.shape)}, expected {shape}")
    if loaded_weight.dtype is not None and loaded_weight.dtype not in dtypes:  # None: becomes float32
        raise ValueError(f"dtype {loaded_weight.dtype}, expected {' or '.join(sorted(map(str, dtypes)))}")


def check_finite(values: Tensor) -> None:
    # The least and the greatest say it for all, NaN too, and take a few percent of loading; `isfinite` takes
    # several times as long.
    if values.numel() and not all(map(math.isfinite, values.aminmax())):
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
    checkpoint = FolderCheckpoint(path) if isinstance(path, str | os.PathLike) else path
    if checkpoint.fill is not None:
        checkpoint.fill(model)
        return
    places = find_places(model)
    waiting = dict(places)
    tensors = checkpoint.tensors()
    for change in checkpoint.changes:
        tensors = change(tensors, model, places)
    # With another default device, whole tensors would be copied to it before they are sliced.
    with torch.device("cpu"):
        for tensor in tensors:
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
        told = f"{missing[0]}, the first of {len(missing)} that are missing"
        raise ValueError(f"{checkpoint.path} has no tensor {told}")


def find_places(model: nn.Module) -> dict[str, StoredTensor]:
    """
    Each tensor that the model takes, by its name in a checkpoint. Several may be parts of one parameter, as
    `packed_modules_mapping` says, and a tied one has two names, of which many files have both. A layer whose
    checkpoints have other tensors than it has parameters says so in `stored_tensors`; those parameters have
    None as `weight_loader`.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    first_names = dict(model.named_parameters())
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        loader = getattr(param, "weight_loader", default_weight_loader)
        if loader is not None:
            found[name] = StoredTensor(functools.partial(loader, param), name not in first_names)
    for name, layer in model.named_modules():
        if hasattr(layer, "stored_tensors"):
            found |= layer.stored_tensors(name)
    places = {}
    for name, place in found.items():
        places[name] = place
        for source, (target, shard_id) in packed.items():
            if f".{target}." in f".{name}.":
                places.pop(name, None)
                source_name = f".{name}.".replace(f".{target}.", f".{source}.").strip(".")
                places[source_name] = place._replace(load=functools.partial(place.load, shard_id=shard_id))
    return places


def pack_weights(model: nn.Module) -> None:
    """Bring the weights, which are loaded, into the layouts that multiply fastest on their device."""
    for module in model.modules():
        if hasattr(module, "finish"):
            module.finish()
