"""Fills a model's parameters with a checkpoint's tensors, or with random numbers.

Each parameter's `weight_loader` decides which part of a tensor goes where. A tensor without a place and a
parameter without a tensor are errors: a model never runs with missing weights.
"""

import math
import os
import zlib
from typing import Any

import torch
from torch import nn

from nanovllm.checkpoints import Checkpoint, open_checkpoint

# Old versions of transformers saved these; here they are computed from the configuration.
IGNORED = ".rotary_emb.inv_freq"


def default_weight_loader(
    param: torch.Tensor, loaded_weight: Any, part: Any = slice(None), shape: tuple[int, ...] | None = None
) -> None:
    """
    Copy a part of `loaded_weight`, which gives a tensor when sliced. Raises ValueError on a shape of the
    whole that is not `shape` (the parameter's, unless given), and on a weight that is not finite, or not any
    more in the parameter's dtype.
    """
    expected = tuple(param.shape) if shape is None else shape
    if tuple(loaded_weight.shape) != expected:
        raise ValueError(f"shape {tuple(loaded_weight.shape)}, expected {expected}")
    param.data.copy_(loaded_weight[part])
    # The sum is finite only if all weights are, and takes a few percent of loading; `isfinite` takes several
    # times as long. Where the sum of finite weights overflows, the slower test decides.
    if not math.isfinite(param.data.sum()) and not all(map(math.isfinite, param.data.aminmax())):
        raise ValueError(f"holds NaN, infinity, or a number too large for {param.dtype}")


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
    waiting = find_places(model)
    known = set(waiting)
    # With another default device, whole tensors would be copied to it before they are sliced.
    with torch.device("cpu"):
        for tensor in checkpoint.tensors():
            source = f"{tensor.file}: tensor {tensor.name}"
            if tensor.name not in known:
                if tensor.name.endswith(IGNORED) or is_tied(model, tensor.name):
                    continue
                raise ValueError(f"{source} has no place in {type(model).__name__}")
            if tensor.name not in waiting:
                raise ValueError(f"{source} comes a second time")
            param, shard_ids = waiting.pop(tensor.name)
            weight_loader = getattr(param, "weight_loader", default_weight_loader)
            try:
                weight_loader(param, tensor, *shard_ids)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
    if waiting:
        first, *others = waiting
        more = f" and {len(others)} others" if others else ""
        raise ValueError(f"{checkpoint.path} has no tensor {first}{more}")


def find_places(model: nn.Module) -> dict[str, tuple[nn.Parameter, tuple]]:
    """
    Name in a checkpoint of each tensor that the model needs -> the parameter that it goes to, and, if it is a
    part of a packed one, a tuple of which part.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    places = {}
    for name, param in model.named_parameters():
        parts = name.split(".")
        places[name] = (param, ())
        for source, (target, shard_id) in packed.items():
            if target in parts:
                places.pop(name, None)
                places[".".join(source if part == target else part for part in parts)] = (param, (shard_id,))
    return places


def is_tied(model: nn.Module, name: str) -> bool:
    """Whether `name` is a second name of a parameter that is loaded under its first one."""
    every_name = dict(model.named_parameters(remove_duplicate=False))
    return name in every_name and name not in dict(model.named_parameters())


def fill_with_random_values(model: nn.Module) -> None:
    """Norms are 1, biases 0, matrices normal with deviation 0.02, the same every time for the same name."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, param in model.named_parameters():
        if param.dim() == 1:
            param.fill_(0 if name.endswith("bias") else 1)
            continue
        generator = generators.setdefault(param.device, torch.Generator(param.device))
        param.normal_(0, 0.02, generator=generator.manual_seed(zlib.crc32(name.encode())))
