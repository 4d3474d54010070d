"""What all checkpoints have in common, and a local folder in Hugging Face's layout, which the core reads.

A checkpoint has a configuration, a tokenizer, ends of sequences, and tensors, which are read when a slice is
taken.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.utils.validation import integer

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Checkpoint:
    """
    `path` is what opens it again. It can be pickled, for the other ranks. `source` is what errors in the
    configuration name.

    Subclasses have `fields()`, which are those of config.json, `tensors()` and `tokenizer()`.
    """

    fill: Callable[..., None] | None = None  # (model): makes weights up, in place of `tensors`
    # (tensors, model, the names of those that it takes) -> the tensors that it gets
    changes: tuple[Callable[..., Iterator[Any]], ...] = ()
    read_config: Callable[..., ModelConfig] = staticmethod(ModelConfig.from_dict)

    def __init__(self, path: str):
        self.path = self.source = path

    def hf_config(self) -> ModelConfig:
        """What is known of the model. Raises ValueError."""
        return self.read_config(self.source, self.fields())

    def generation_config(self) -> dict[str, Any]:
        """What generation_config.json holds."""
        return {}

    def named_eos(self) -> list[Any]:
        """What the files say of ends of sequences: token ids, lists of ids, None."""
        return [values.get("eos_token_id") for values in (self.generation_config(), self.fields())]

    def eos_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Every token id that ends a sequence, from the files and the tokenizer. Raises ValueError."""
        as_token_id, token_ids = integer(0), {}  # the keys, in order, each once
        for named in (*self.named_eos(), getattr(tokenizer, "eos_token_id", None)):
            for token_id in named if isinstance(named, list) else [named]:
                if token_id is not None:
                    token_ids[as_token_id(token_id, f"{self.path}: eos_token_id")] = None
        return tuple(token_ids)


class FolderCheckpoint(Checkpoint):
    def __init__(self, path: str):
        super().__init__(os.path.expanduser(path))
        self.folder = Path(self.path)
        self.source = f"{self.folder}/config.json"
        self.config = read_json(self.folder / "config.json")

    def fields(self) -> dict[str, Any]:
        if not os.path.exists(self.source):
            raise ValueError(f"{self.path} has no config.json")
        return self.config

    def has_tokenizer(self) -> bool:
        return any((self.folder / name).exists() for name in TOKENIZER_FILES)

    def tokenizer(self) -> Any:
        """None if the folder has none."""
        if not self.has_tokenizer():
            return None
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        tokenizer.clean_up_tokenization_spaces = False  # so that a text is made of the texts of its parts
        return tokenizer

    def generation_config(self) -> dict[str, Any]:
        return read_json(self.folder / "generation_config.json")

    def tensors(self) -> Iterator["SafetensorsTensor"]:
        from safetensors import SafetensorError, safe_open

        for file, listed in self.shards().items():
            try:
                with safe_open(file, framework="pt") as shard:
                    for name in listed or shard.keys():
                        yield SafetensorsTensor(str(file), name, shard.get_slice(name))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is not a complete safetensors file: {error}") from error

    def file(self, name: str) -> Path:
        """The file of this name. Raises ValueError unless it is in the folder."""
        path = self.folder / name
        if path.name != name or not path.is_file():
            raise ValueError(f"{self.folder}: {name!r} is missing, or is not a file in the folder")
        return path

    def shards(self) -> dict[Path, list[str]]:
        """Files with weights -> the tensors that the index lists for each; none if there is no index."""
        if shards := read_index(self.folder):
            return {self.file(file): listed for file, listed in sorted(shards.items())}
        return dict.fromkeys(sorted(self.folder.glob("*.safetensors")), [])


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds, {} if there is no such file. Raises ValueError naming the file."""
    try:
        value = json.loads(file.read_bytes()) if file.exists() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def read_index(folder: Path) -> dict[str, list[str]]:
    """Names of files with weights -> the tensors that the index lists for each; {} without an index."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: weight_map must say the file of each tensor")
    shards: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        shards.setdefault(file, []).append(tensor)
    return shards


class SafetensorsTensor:
    """One tensor of a safetensors file. A slice is a view of the mapped file: no other part of it is read."""

    def __init__(self, file: str, name: str, stored: Any):
        self.file = file
        self.name = name
        self.shape = tuple(stored.get_shape())
        self._stored = stored

    @property
    def dtype(self) -> torch.dtype:
        """Raises ValueError for one that no weight has. A tensor that is not needed may have any."""
        if (dtype := self._stored.get_dtype()) not in DTYPES:
            raise ValueError(f"dtype {dtype}, which is none of {', '.join(DTYPES)}")
        return DTYPES[dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._stored[index]
