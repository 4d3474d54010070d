"""A local folder in Hugging Face's layout: config.json, safetensors files, a tokenizer."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.checkpoints.tokenizer import guard_decode, tokenizer_errors, toy_tokenizer
from nanovllm.checkpoints.untrusted import check_room, file_inside, leads_inside, read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# Of quantised weights and what belongs to them.
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
DTYPES |= {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
FOLDER_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".spm", ".codes", ".tokenizer")
TEMPLATE_FOLDER = "additional_chat_templates"
# transformers takes any of its classes by name. Those that are no tokenizers may read pickles, or ask the
# user whether to run code from the folder.
TOKENIZER_CLASS = re.compile(r"(?!Auto)\w+(Tokenizer|TokenizerFast|Backend)")
# Settings that some tokenizers take as names of files to open, like all settings that end in _file.
FILE_SETTINGS = ("vocab", "merges", "source_spm", "target_spm")
# In tokenizer.json, some tokenizers take a vocabulary that is a text as the name of a file. JSON may write
# the letters of the key as escapes.
VOCAB_IS_TEXT = re.compile(rb'"(?:v|\\u0076)(?:o|\\u006[fF])(?:c|\\u0063)(?:a|\\u0061)(?:b|\\u0062)"\s*:\s*"')


class FolderCheckpoint(Checkpoint):
    """A local folder in Hugging Face's layout; `only_tokenizer` says that nothing else has to be there."""

    def __init__(self, path: str, random_weights: bool = False, only_tokenizer: bool = False):
        super().__init__(path, random_weights)
        self.folder = Path(path)
        for entry in [*self.folder.iterdir(), *self.folder.glob(f"{TEMPLATE_FOLDER}/*")]:
            if entry.suffix in FOLDER_SUFFIXES:
                file_inside(self.folder, str(entry.relative_to(self.folder)))
            elif entry.is_symlink() and not leads_inside(self.folder, entry):  # to a folder, perhaps
                raise ValueError(f"{self.folder}: {entry.name!r} leads out of the folder")
        if only_tokenizer and not self._has_tokenizer():
            raise ValueError(f"{path} has none of {', '.join(TOKENIZER_FILES)}")
        if not only_tokenizer and not (self.folder / "config.json").exists():
            hint = "; name the .gguf file itself to load it" if any(self.folder.glob("*.gguf")) else ""
            raise ValueError(f"{path} has no config.json{hint}")
        self.config = read_json(self.folder / "config.json")

    def hf_config(self, model_impl: str = "auto") -> ModelConfig:
        config = ModelConfig.from_dict(self.folder / "config.json", self.config, model_impl)
        if not self.random_weights:
            stored = sum(file.stat().st_size for file in self._shards())
            bits = 4 if config.quantization_config else 8
            check_room(f"{self.path}/config.json", config, stored, bits)
        return config

    def override(self, fields: dict[str, Any]) -> None:
        self.config = self.config | fields

    def _has_tokenizer(self) -> bool:
        return any((self.folder / name).exists() for name in TOKENIZER_FILES)

    def tokenizer(self) -> Any:
        if not self._has_tokenizer():
            return toy_tokenizer() if self.random_weights else None
        self._check_tokenizer_config()
        from transformers import AutoTokenizer

        options = {"local_files_only": True, "trust_remote_code": False}
        with tokenizer_errors(f"{self.path}: transformers cannot read the tokenizer"):
            return guard_decode(AutoTokenizer.from_pretrained(self.path, **options), self.path)

    def _check_tokenizer_config(self) -> None:
        """Raise ValueError if transformers would open a file elsewhere or load what is no tokenizer."""
        file = self.folder / "tokenizer_config.json"
        settings = read_json(file)
        for name in (self.config.get("tokenizer_class"), settings.get("tokenizer_class")):
            if name is not None and not (isinstance(name, str) and TOKENIZER_CLASS.fullmatch(name)):
                raise ValueError(f"{self.path}: tokenizer_class cannot be {name!r:.100}")
        for key, value in settings.items():
            # Many have the path of a special_tokens_map_file on the author's machine. It is never opened.
            names_file = key in FILE_SETTINGS or (key.endswith("_file") and key != "special_tokens_map_file")
            if names_file and value is not None:
                raise ValueError(f"{file}: {key} cannot be {value!r:.100}; files have fixed names")
        versions = settings.get("fast_tokenizer_files", [])
        versions = versions if isinstance(versions, list) else [versions]
        stored = [file_inside(self.folder, name) for name in versions]
        for file in (self.folder / "tokenizer.json", *stored):
            if file.exists() and VOCAB_IS_TEXT.search(file.read_bytes()):
                raise ValueError(f"{file}: the vocabulary cannot be the name of a file")

    def generation_config(self) -> dict[str, Any]:
        return read_json(self.folder / "generation_config.json")

    def named_eos(self) -> list[Any]:
        return [self.generation_config().get("eos_token_id"), self.config.get("eos_token_id")]

    def tensors(self) -> Iterator["SafetensorsTensor"]:
        from safetensors import SafetensorError, safe_open

        for file, listed in self._shards().items():
            try:
                shard = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
            with shard:
                stored = shard.keys()
                if lacking := sorted(set(listed) - set(stored)):
                    raise ValueError(f"{file} lacks tensor {lacking[0]}, which the index says it holds")
                for name in listed or stored:
                    yield SafetensorsTensor(str(file), name, shard.get_slice(name))

    def _shards(self) -> dict[Path, list[str]]:
        """Files with weights -> the tensors that the index lists for each; none if there is no index."""
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            if files := sorted(self.folder.glob("*.safetensors")):
                return {file: [] for file in files}
            others = sorted(f.name for f in self.folder.iterdir() if f.suffix in (".bin", ".pt", ".pth"))
            only = f" (only {', '.join(others[:3])})" if others else ""
            raise ValueError(f"{self.path} has no safetensors file{only}; only safetensors and GGUF are read")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index}: weight_map must say the file of each tensor")
        shards: dict[str, list[str]] = {}
        for tensor, file in weight_map.items():
            shards.setdefault(file, []).append(tensor)
        return {file_inside(self.folder, file): listed for file, listed in sorted(shards.items())}


class SafetensorsTensor:
    """One tensor of a safetensors file. A slice is a view of the mapped file: no other part of it is read."""

    def __init__(self, file: str, name: str, stored: Any):
        self.file = file
        self.name = name
        self.shape = tuple(stored.get_shape())
        self._stored = stored
        if (dtype := stored.get_dtype()) not in DTYPES:
            raise ValueError(f"{file}: tensor {name} has dtype {dtype}, which is none of {', '.join(DTYPES)}")
        self.dtype = DTYPES[dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._stored[index]
