"""What checkpoints of all kinds have in common: a configuration, tensors, a tokenizer, ends of sequences."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.utils.validation import check


class Checkpoint:
    """
    `path` is what opens it again, without asking the hub. `random_weights` says whether weights are made up
    ("dummy") instead of read. It can be pickled, for the other ranks. `device` is where weights will be:
    whoever loads them says so. `source` is what errors in the configuration name.

    Subclasses have `fields()`, which are those of config.json, `tensors()` and `tokenizer()`.
    """

    device = torch.device("cpu")
    tokenizer_source: "Checkpoint | None" = None  # where the tokenizer is, if not here
    # (tensors with a model's names, those names that it uses for two things) -> the tensors that it gets
    changes: tuple[Callable[..., Iterator[Any]], ...] = ()
    read_config: Callable[[str, dict[str, Any]], ModelConfig] = staticmethod(ModelConfig.from_dict)

    def __init__(self, path: str, random_weights: bool = False):
        self.path = self.source = path
        self.random_weights = random_weights

    def hf_config(self) -> ModelConfig:
        """What is known of the model. Raises ValueError."""
        return self.read_config(self.source, self.fields())

    def fill(self, model: nn.Module) -> None:
        """Make weights up, for a checkpoint with `random_weights`."""
        raise ValueError(f"{self.path}: weights can only be read")

    def override(self, fields: dict[str, Any]) -> None:
        """Read config.json as if it had these fields. Raises ValueError if there is no such file."""
        raise ValueError(f"hf_overrides are for config.json, which {self.path!r} does not have")

    def generation_config(self) -> dict[str, Any]:
        """What generation_config.json holds."""
        return {}

    def named_eos(self) -> list[Any]:
        """What the files say of ends of sequences: token ids, lists of ids, None."""
        return []

    def eos_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Every token id that ends a sequence, from the files and the tokenizer. Raises ValueError."""
        named = [*self.named_eos(), getattr(tokenizer, "eos_token_id", None)]
        lists = [each if isinstance(each, list) else [each] for each in named if each is not None]
        token_ids = [*itertools.chain(*lists)]
        for token_id in token_ids:
            is_id = type(token_id) is int and token_id >= 0
            check(is_id, f"{self.path}: eos_token_id must be token ids", token_id)
        return tuple(dict.fromkeys(token_ids))
