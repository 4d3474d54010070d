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
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nanovllm.checkpoints.folder import Checkpoint, read_json
from nanovllm.extensions.checkpoints.hub import fetch
from nanovllm.extensions.checkpoints.library_errors import library_errors
from nanovllm.extensions.checkpoints.names import MadeTensor, own_name, tied_names
from nanovllm.extensions.checkpoints.text_part import text_name
from nanovllm.extensions.checkpoints.untrusted import file_inside
from nanovllm.extensions.quantised.patterns import pattern
from nanovllm.utils.validation import check, is_number, shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's wrappers around the model
FACTOR = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.weight)?")
PLAIN_NAME = re.compile(r"[\w.]+")
MAX_PATTERNS = 64
# What these fields may say. Other initialisations change the matrices themselves when training begins.
ALLOWED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
# Fields that are read here, that matter only to training, or that layers know better (fan_in_fan_out). Any
# other that is set changes what the adapter does.
KNOWN_FIELDS = """
    r lora_alpha use_rslora rank_pattern alpha_pattern fan_in_fan_out auto_mapping base_model_name_or_path
    revision inference_mode task_type peft_version lora_dropout target_modules exclude_modules modules_to_save
    layers_to_transform layers_pattern loftq_config eva_config megatron_config megatron_core qalora_group_size
""".split()


def add_adapter(checkpoint: Checkpoint, name: str | os.PathLike, hub: dict[str, Any]) -> None:
    """
    Have a checkpoint's tensors be merged with an adapter, from a folder or a hub id; `hub` has options for
    downloads. Raises ValueError, also if no adapter can be merged with such weights.
    """
    is_quantised = checkpoint.hf_config().quantization_config is not None
    if is_quantised or checkpoint.fill is not None:
        kind = "quantised" if is_quantised else "made up"
        raise ValueError(
            f"lora={shown(name)} cannot be merged with weights that are {kind}, as in {checkpoint.path}; "
            "load those that it was trained on, and if they are to be quantised, with quantization='fp8' or "
            "'int4'"
        )
    path = os.path.abspath(os.path.expanduser(name))
    if not os.path.isdir(path):
        path = fetch(os.fspath(name), [CONFIG_FILE, WEIGHTS_FILE], hub, "lora")
    checkpoint.changes += (Adapter(Path(path)).merged,)


class Adapter:
    """It can be pickled, for the other ranks. Raises ValueError that names the file and what is wrong."""

    def __init__(self, folder: Path):
        self.config_file = file_inside(folder, CONFIG_FILE)
        if not (folder / WEIGHTS_FILE).exists():
            raise ValueError(f"{folder} has no {WEIGHTS_FILE}: adapters are read from safetensors only")
        self.file = file_inside(folder, WEIGHTS_FILE)
        self.config = read_json(self.config_file)
        for field, value in self.config.items():
            if field in ALLOWED:
                names = [*map(shown, ALLOWED[field])]
                rule = f"{self.config_file}: {field} must be {' or '.join(names)}"
                check(shown(value) in names, rule, value)
            elif value and field not in KNOWN_FIELDS:
                raise ValueError(f"{self.config_file}: {field}={shown(value)} is not supported")
        self.ranks = self._read_pattern("rank_pattern", "r")
        self.alphas = self._read_pattern("alpha_pattern", "lora_alpha")

    def _read_pattern(self, field: str, usual: str) -> list[tuple[re.Pattern, Any]]:
        """
        Values by patterns for names of modules, the first that matches counts. As PEFT has it: a key is a
        regular expression for the end of a name, and another field has what is usual.
        """
        source, given = f"{self.config_file}: {field}", self.config.get(field) or {}
        check(isinstance(given, dict), f"{source} must have patterns of names", given)
        if sum(not PLAIN_NAME.fullmatch(key) for key in given) > MAX_PATTERNS:
            raise ValueError(f"{source} has more than {MAX_PATTERNS} patterns")
        found = [(pattern(source, rf"(.*\.)?({key})$", key), value) for key, value in given.items()]
        return [*found, (re.compile(""), self.config.get(usual, 8))]

    def merged(self, tensors: Iterable[Any], model: nn.Module, known: Collection[str]) -> Iterator[Any]:
        """
        The tensors of a checkpoint, by the model's names, with the adapter in those that it changes. Raises
        ValueError, also for a part of the adapter that no tensor has taken.
        """
        shared, read = tied_names(model).values(), self._read()
        parts = {own_name(name, model, known): found for name, found in read.items()}
        for tensor in tensors:
            found = parts.pop(tensor.name, {})
            if found and tensor.name in shared:
                raise ValueError(
                    f"{self.file}: what it has for {tensor.name} cannot be merged: embedding and LM head "
                    "share this tensor"
                )
            if (saved := found.pop("whole", None)) is not None:
                if getattr(tensor, "is_transposed", False):  # by transformers
                    saved = saved.t()
                tensor = MadeTensor(str(self.file), tensor.name, saved)
            if found:
                # Only now, as names of the model, which are short, can be matched with any pattern.
                update, stored = self._update(tensor, found), tensor[...]
                tensor = MadeTensor(tensor.file, tensor.name, update.to(stored.device).add_(stored))
            yield tensor
        if left := [*parts]:
            names = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise ValueError(f"{self.file}: the model has no tensor to merge with {names}")

    def _read(self) -> dict[str, dict[str, Tensor]]:
        """
        By names of a checkpoint's tensors: what to take instead ("whole"), the factors of what to add.
        Without what is for images, which no model here reads.
        """
        from safetensors.torch import load_file

        with library_errors(f"{self.file} is not a complete safetensors file"):
            stored = load_file(self.file)
        parts = defaultdict(dict)
        for key, tensor in stored.items():
            name = text_name(key.removeprefix(PREFIX))
            if name is None:
                continue
            if found := FACTOR.fullmatch(name):
                parts[f"{found[1]}.weight"][found[2]] = tensor
            elif "lora_" in name:
                raise ValueError(f"{self.file}: tensor {key} is of a kind that is not supported")
            else:
                parts[name.replace(".base_layer.", ".")]["whole"] = tensor
        return parts

    def _update(self, tensor: Any, factors: dict[str, Tensor]) -> Tensor:
        """What is added to a matrix: scale * b @ a, with a [rank, in] and b [out, rank], or its transpose."""
        module, kinds = tensor.name.removesuffix(".weight"), sorted(factors)
        if kinds not in (["A", "B"], ["embedding_A", "embedding_B"]):
            raise ValueError(f"{self.file}: {module} has only lora_{' and lora_'.join(kinds)}")
        rank, alpha = (
            next(value for key, value in each if key.match(module)) for each in (self.ranks, self.alphas)
        )
        are_numbers = is_number(rank, int, 1) and is_number(alpha, float)
        check(are_numbers, f"{self.config_file}: {module} must have two numbers", (rank, alpha))
        a, b = (factors[kind].float() for kind in kinds)
        if [a.shape[:-1], b.shape[1:]] != [(rank,), (rank,)]:
            raise ValueError(
                f"{self.file}: {module} has factors of shapes {tuple(a.shape)} and {tuple(b.shape)}, "
                f"expected rank {rank}"
            )
        if "embedding_A" in kinds:
            a, b = b.t(), a.t()
        shape, expected = (b.shape[0], a.shape[1]), tuple(tensor.shape)
        if shape != expected:
            raise ValueError(
                f"{self.file}: what it has for {tensor.name} has shape {shape}, expected {expected}"
            )
        return b @ a * (alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))
