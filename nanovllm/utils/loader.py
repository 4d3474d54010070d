"""Fills a model's parameters with a checkpoint's tensors, or with random numbers.

Each parameter's `weight_loader` decides which part of a tensor goes where. A tensor without a place and a
parameter without a tensor are errors: a model never runs with missing weights.
"""

import functools
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.checkpoints import Checkpoint, open_checkpoint

# Old versions of transformers saved the first; here they are computed from the configuration. The others are
# for a KV cache of 8 bits.
IGNORED = (".rotary_emb.inv_freq", ".self_attn.k_scale", ".self_attn.v_scale")
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


@torch.no_grad()
def load_model(model: nn.Module, path: str | os.PathLike | Checkpoint) -> None:
    """
    Fill every parameter of `model`, on the device and with the dtype that it has, from a checkpoint or what
    `open_checkpoint` opens. Raises ValueError naming file and tensor.
    """
    checkpoint = open_checkpoint(path) if isinstance(path, (str, os.PathLike)) else path
    if checkpoint.random_weights:
        fill_with_random_values(model)
        return
    checkpoint.device = next(model.parameters()).device
    waiting = find_places(model)
    known = set(waiting)
    # With another default device, whole tensors would be copied to it before they are sliced.
    with torch.device("cpu"):
        tensors = checkpoint.tensors()
        if hasattr(model, "converted"):
            tensors = model.converted(tensors)
        if checkpoint.adapter is not None:
            tensors = checkpoint.adapter.merged(tensors, tied_names(model))
        for tensor in tensors:
            source = f"{tensor.file}: tensor {tensor.name}"
            if tensor.name not in known:
                if tensor.name.endswith(IGNORED) or is_tied(model, tensor.name):
                    continue
                raise ValueError(f"{source} has no place in {type(model).__name__}")
            if tensor.name not in waiting:
                raise ValueError(f"{source} comes a second time")
            try:
                waiting.pop(tensor.name).load(tensor)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
    if missing := [name for name, place in waiting.items() if not place.is_optional]:
        first, *others = missing
        more = f" and {len(others)} others" if others else ""
        raise ValueError(f"{checkpoint.path} has no tensor {first}{more}")
    for module in layers_that_store(model).values():
        module.format.finish()


class StoredTensor(NamedTuple):
    """A tensor that checkpoints have: what loads it, and whether it may be missing."""

    load: Callable[..., None]
    is_optional: bool = False


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
    for name, layer in layers_that_store(model).items():
        found |= layer.stored_tensors(name)
    places = {}
    for name, place in found.items():
        parts = name.split(".")
        merged = [source for source, (target, _) in packed.items() if target in parts]
        if not merged:
            places[name] = place
        for source in merged:
            target, shard_id = packed[source]
            source_name = ".".join(source if part == target else part for part in parts)
            places[source_name] = place._replace(load=functools.partial(place.load, shard_id=shard_id))
    return places


def tied_names(model: nn.Module) -> set[str]:
    """The names of parameters that have several."""
    names = [(name, id(param)) for name, param in model.named_parameters(remove_duplicate=False)]
    counts = Counter(param for _, param in names)
    return {name for name, param in names if counts[param] > 1}


def is_tied(model: nn.Module, name: str) -> bool:
    """Whether `name` is a second name of a parameter that is loaded under its first one."""
    every_name = dict(model.named_parameters(remove_duplicate=False))
    return name in every_name and name not in dict(model.named_parameters())


def layers_that_store(model: nn.Module) -> dict[str, Any]:
    """Layers whose checkpoints have other tensors than they have parameters, by name."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "stored_tensors")}
    return {name: layer for name, layer in layers.items() if layer.stored_tensors(name)}


def fill_with_random_values(model: nn.Module) -> None:
    """
    Norms are 1, biases 0, matrices normal with deviation 0.02, the same every time for the same name.
    Quantised ones are made from such a matrix.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def make_normal(matrix: Tensor, name: str) -> Tensor:
        generator = generators.setdefault(matrix.device, torch.Generator(matrix.device))
        return matrix.normal_(0, 0.02, generator=generator.manual_seed(zlib.crc32(name.encode())))

    for name, param in model.named_parameters():
        if getattr(param, "weight_loader", default_weight_loader) is None:
            continue
        if param.dim() == 1:
            param.fill_(0 if name.endswith("bias") else 1)
        else:
            make_normal(param, name)
    for name, layer in layers_that_store(model).items():
        matrix = torch.empty(layer.format.shape, device=next(layer.parameters()).device)
        layer.format.fill(make_normal(matrix, f"{name}.weight"))
