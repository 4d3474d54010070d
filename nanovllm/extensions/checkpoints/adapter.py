"""A LoRA adapter in PEFT's format, merged into the tensors of a checkpoint as they are read.

Knows files and names of tensors, nothing about layers. A matrix W becomes W + s B A, with s = alpha / rank
(https://arxiv.org/abs/2106.09685) or alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732), in float32, and
is rounded once, to the dtype in which it is loaded. The tensors say which matrices these are, not the names
and patterns in the configuration, which are for training.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.checkpoints.folder import Checkpoint, read_json
from nanovllm.extensions.checkpoints.hub import fetch
from nanovllm.extensions.checkpoints.names import tied_names
from nanovllm.extensions.checkpoints.untrusted import file_inside
from nanovllm.extensions.quantised.patterns import pattern
from nanovllm.utils.validation import check, is_number, shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's wrappers around the model
FACTOR = re.compile(r"(.+)\.lora_(A\.weight|B\.weight|embedding_A|embedding_B)")
PLAIN_NAME = re.compile(r"[\w.]+")
MAX_PATTERNS = 64
# Fields that are read here, that matter only to training, or that layers know better (fan_in_fan_out). Any
# other that is set changes what the adapter does.
KNOWN_FIELDS = set(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern fan_in_fan_out bias init_lora_weights "
    "auto_mapping base_model_name_or_path revision inference_mode task_type peft_version lora_dropout "
    "target_modules exclude_modules modules_to_save layers_to_transform layers_pattern loftq_config "
    "eva_config megatron_config megatron_core qalora_group_size".split()
)
# Of `init_lora_weights`: others change the matrices themselves when training begins.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


class Adapter:
    """It can be pickled, for the other ranks. Raises ValueError that names the file and what is wrong."""

    def __init__(self, folder: Path):
        self.config_file = file_inside(folder, CONFIG_FILE)
        if not (folder / WEIGHTS_FILE).exists():
            raise ValueError(f"{folder} has no {WEIGHTS_FILE}: adapters are read from safetensors only")
        self.file = file_inside(folder, WEIGHTS_FILE)
        config = read_json(self.config_file)
        self._refuse(config, "peft_type", "LORA")
        self._refuse(config, "bias", "none")
        self._refuse(config, "init_lora_weights", *INITIALISATIONS)
        for field, value in config.items():
            if value and field not in KNOWN_FIELDS:
                raise ValueError(f"{self.config_file}: {field}={shown(value)} is not supported")
        self.rank, self.alpha = config.get("r", 8), config.get("lora_alpha", 8)
        self.ranks = self._read_pattern(config, "rank_pattern")
        self.alphas = self._read_pattern(config, "alpha_pattern")
        self.has_root_scale = bool(config.get("use_rslora"))

    def _refuse(self, config: dict[str, Any], field: str, *allowed: Any) -> None:
        """Raise ValueError unless the field has one of these values, or is not there."""
        value = config.get(field, allowed[0])
        is_allowed = any(type(value) is type(each) and value == each for each in allowed)
        check(is_allowed, f"{self.config_file}: {field} must be {' or '.join(map(repr, allowed))}", value)

    def _read_pattern(self, config: dict[str, Any], field: str) -> list[tuple[re.Pattern, Any]]:
        """As PEFT has it: a key is a regular expression for the end of a module's name."""
        source, given = f"{self.config_file}: {field}", config.get(field) or {}
        check(isinstance(given, dict), f"{source} must have patterns of names", given)
        others = [key for key in given if not PLAIN_NAME.fullmatch(key)]
        if len(others) > MAX_PATTERNS:
            raise ValueError(f"{source} has more than {MAX_PATTERNS} patterns")
        return [(pattern(source, rf"(.*\.)?({key})$", key), value) for key, value in given.items()]

    def merged(self, tensors: Iterable[Any], model: nn.Module, known: Collection[str]) -> Iterator[Any]:
        """
        The tensors of a checkpoint, by the model's names, with the adapter in those that it changes. Raises
        ValueError, also for a part of the adapter that no tensor has taken.
        """
        shared = tied_names(model).values()
        replacements, all_factors = self._read()
        for tensor in tensors:
            saved, factors = replacements.pop(tensor.name, None), all_factors.pop(tensor.name, None)
            if saved is None and factors is None:
                yield tensor
                continue
            if saved is not None:
                if getattr(tensor, "is_transposed", False):  # by transformers
                    saved = saved.t()
                self._check_shape(tensor, saved.shape)
            if tensor.name in shared:
                source = f"{self.file}: what it has for {tensor.name}"
                raise ValueError(f"{source} cannot be merged: embedding and LM head share this tensor")
            # Only now, as names of the model, which are short, can be matched with any pattern.
            update = None if factors is None else self._update(tensor, factors)
            yield Adapted(tensor.name, tensor.file, tensor.shape, tensor if saved is None else saved, update)
        if left := [*replacements, *all_factors]:
            names = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise ValueError(f"{self.file}: the model has no tensor to merge with {names}")

    def _read(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
        """By the names of a checkpoint's tensors: those to take instead, and the factors of what to add."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            stored = load_file(self.file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.file} is not a complete safetensors file: {error}") from error
        replacements: dict[str, torch.Tensor] = {}
        factors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, tensor in stored.items():
            name = key.removeprefix(PREFIX)
            if not tensor.is_floating_point():
                raise ValueError(f"{self.file}: tensor {key} has dtype {tensor.dtype}, expected floats")
            if found := FACTOR.fullmatch(name):
                factors[f"{found[1]}.weight"][found[2].removesuffix(".weight")] = tensor
            elif "lora_" in name:
                raise ValueError(f"{self.file}: tensor {key} is of a kind that is not supported")
            else:
                replacements[name.replace(".base_layer.", ".")] = tensor
        return replacements, factors

    def _check_shape(self, tensor: Any, shape: Sequence[int]) -> None:
        if tuple(shape) != tuple(tensor.shape):
            shapes = f"{tuple(shape)}, expected {tuple(tensor.shape)}"
            raise ValueError(f"{self.file}: what it has for {tensor.name} has shape {shapes}")

    def _update(self, tensor: Any, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        """What is added to a matrix: scale * b @ a, with a [rank, in] and b [out, rank], or its transpose."""
        module, kinds = tensor.name.removesuffix(".weight"), set(factors)
        if kinds not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            raise ValueError(f"{self.file}: {module} has only lora_{' and lora_'.join(sorted(kinds))}")
        a, b = (factors[kind] for kind in sorted(kinds))
        rank, alpha = _setting(self.ranks, module, self.rank), _setting(self.alphas, module, self.alpha)
        if not is_number(rank, int, 1) or not is_number(alpha, float):
            found = f"r={shown(rank)} and lora_alpha={shown(alpha)}"
            raise ValueError(f"{self.config_file}: {module} must have two numbers, got {found}")
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            found = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise ValueError(f"{self.file}: {module} has factors of shapes {found}, expected rank {rank}")
        scale = alpha / (math.sqrt(rank) if self.has_root_scale else rank)
        is_transposed, shape = "embedding_A" in kinds, (b.shape[0], a.shape[1])
        self._check_shape(tensor, shape[::-1] if is_transposed else shape)
        value = b.float() @ a.float() * scale
        return value.T if is_transposed else value


def _setting(pattern: list[tuple[re.Pattern, Any]], module: str, default: Any) -> Any:
    return next((value for key, value in pattern if key.match(module)), default)


@dataclass
class Adapted:
    """A tensor with the adapter in it, which joins slices when they are taken."""

    name: str
    file: str
    shape: tuple[int, ...]
    stored: Any
    update: torch.Tensor | None  # what is added

    @property
    def dtype(self) -> torch.dtype | None:
        return self.stored.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.stored[index].float()
        return part if self.update is None else part + self.update[index].to(part.device)


def check_adaptable(checkpoint: Checkpoint, lora: str | os.PathLike) -> None:
    """Raise ValueError if no adapter can be merged with the weights of a checkpoint."""
    is_quantised = checkpoint.hf_config().quantization_config is not None
    if is_quantised or checkpoint.fill is not None:
        kind = "quantised" if is_quantised else "made up"
        raise ValueError(
            f"lora={shown(lora)} cannot be merged with weights that are {kind}, as in {checkpoint.path}; "
            "load those that it was trained on, and if they are to be quantised, with quantization='fp8' or "
            "'int4'"
        )


def open_adapter(name: str | os.PathLike, hub: dict[str, Any]) -> Adapter:
    """From a folder or a hub id; `hub` has options for downloads. Raises ValueError."""
    path = os.path.abspath(os.path.expanduser(name))
    if not os.path.isdir(path):
        missing = f"lora {os.fspath(name)!r}: there is no such folder"
        path = fetch(os.fspath(name), [CONFIG_FILE, WEIGHTS_FILE], hub, missing)
    return Adapter(Path(path))
