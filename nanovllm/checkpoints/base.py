"""What checkpoints of all kinds have in common, besides the methods that `checkpoints/__init__.py` lists."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.utils.validation import shown

# From tensors that have a model's names, and those names that it uses for two things.
Change = Callable[[Iterable[Any], Collection[str]], Iterator[Any]]


class Checkpoint:
    """
    `path` is what opens it again, without asking the hub. `random_weights` says whether weights are made up
    ("dummy") instead of read. It can be pickled, for the other ranks. `device` is where weights will be:
    whoever loads them says so. `source` is what errors in the configuration name.
    """

    device = torch.device("cpu")
    tokenizer_source: "Checkpoint | None" = None  # where the tokenizer is, if not here
    changes: tuple[Change, ...] = ()  # of the tensors, on their way to the model
    read_config: Callable[[str, dict[str, Any]], ModelConfig] = staticmethod(ModelConfig.from_dict)

    def __init__(self, path: str, random_weights: bool = False):
        self.path = self.source = path
        self.random_weights = random_weights

    def hf_config(self) -> ModelConfig:
        """
        What is known of the model. Raises ValueError, also if it is larger than the files can hold: a small
        one could make us allocate any amount of memory.
        """
        config = self.read_config(self.source, self.fields())
        if not self.random_weights and config.least_bits > 8 * max(self.stored_bytes(), 2**24):
            raise ValueError(f"{self.source} describes a larger model than its files can hold")
        return config

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
        token_ids: list[int] = []
        for named in (*self.named_eos(), getattr(tokenizer, "eos_token_id", None)):
            token_ids += named if isinstance(named, list) else [] if named is None else [named]
        for token_id in token_ids:
            if type(token_id) is not int or token_id < 0:
                raise ValueError(f"{self.path}: eos_token_id must be token ids, got {shown(token_id)}")
        return tuple(dict.fromkeys(token_ids))


@dataclass
class Transposed:
    """A matrix that the checkpoint has as [in, out], as [out, in]."""

    stored: Any

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def file(self) -> str:
        return self.stored.file

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)[::-1]

    @property
    def dtype(self) -> torch.dtype | None:
        return self.stored.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        if index is ...:
            return self.stored[...].t()
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return self.stored[columns, rows].t()
