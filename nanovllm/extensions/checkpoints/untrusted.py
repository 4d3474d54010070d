"""Checks of folders that somebody else has written: no name leads out of them, no file is too large to read,
and no tokenizer is anything else, or fails in other ways than a ValueError.

And, of any checkpoint: its model is not larger than its files. A small file could otherwise make us allocate
any amount of memory.
"""

import math
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from nanovllm.checkpoints.folder import DTYPES, TOKENIZER_FILES, Checkpoint, FolderCheckpoint, read_json
from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.extensions.checkpoints import pickled
from nanovllm.extensions.checkpoints.library_errors import guarded, library_errors
from nanovllm.extensions.checkpoints.made_up import toy_tokenizer
from nanovllm.utils.validation import check

# Of weights of fewer bits and what belongs to them.
DTYPES |= {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
TEKKEN = "tekken.json"  # Mistral's own tokenizer
# By name or ending; several times what the largest models have. JSON takes many times its size in memory.
MAX_BYTES = {"tokenizer.json": 2**26, TEKKEN: 2**26, ".json": 2**24, ".jinja": 2**20}
MAX_BYTES |= dict.fromkeys((".txt", ".model", ".spm", ".codes", ".tokenizer"), 2**28)
MAX_BYTES[".safetensors"] = math.inf
LEAST_BYTES = 2**24  # of weights; smaller models do no harm
OTHER_COPY = "consolidated*.safetensors"  # of Mistral's weights, by names of its own
# transformers takes any of its classes by name. Those that are no tokenizers may read pickles, or ask the
# user whether to run code from the folder.
TOKENIZER_CLASS = re.compile(r"(?!Auto)\w+(Tokenizer|TokenizerFast|Backend)")
# Settings that some tokenizers take as names of files to open, like all settings that end in _file.
FILE_SETTINGS = ("vocab", "merges", "source_spm", "target_spm")
# In tokenizer.json, some tokenizers take a vocabulary that is a text as the name of a file. JSON may write
# the letters of the key as escapes.
VOCAB_IS_TEXT = re.compile(rb'"(?:v|\\u0076)(?:o|\\u006[fF])(?:c|\\u0063)(?:a|\\u0061)(?:b|\\u0062)"\s*:\s*"')


class CheckedFolder(FolderCheckpoint):
    """A folder from a stranger; `only_tokenizer` says that nothing else has to be there."""

    def __init__(self, path: str, only_tokenizer: bool = False):
        folder = Path(path)
        for entry in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
            if entry.suffix in MAX_BYTES or not leads_inside(folder, entry):
                file_inside(folder, str(entry.relative_to(folder)))
        super().__init__(path)
        if only_tokenizer and not self.has_tokenizer():
            raise ValueError(f"{path} has none of {', '.join((*TOKENIZER_FILES, TEKKEN))}")
        if not only_tokenizer and not os.path.exists(self.source):
            hint = "; name the .gguf file itself to load it" if any(folder.glob("*.gguf")) else ""
            raise ValueError(f"{path} has no config.json{hint}")

    def fields(self) -> dict[str, Any]:
        """Older versions of modelopt say in a file of their own how weights are quantised."""
        fields, file = super().fields(), self.folder / "hf_quant_config.json"
        said = read_json(file).get("quantization")
        if fields.get("quantization_config") or said is None:
            return fields
        check(isinstance(said, dict), f"{file}: quantization must be an object", said)
        named = {"quant_method": "modelopt", "ignore": said.get("exclude_modules")}
        return fields | {"quantization_config": said | named}

    def hf_config(self) -> ModelConfig:
        config = super().hf_config()
        stored = self.shards() if self.fill is None else []
        return checked_size(self, config, sum(file.stat().st_size for file in stored))

    def shards(self) -> dict[Path, list[str]]:
        """Raises ValueError if there are no weights that can be read."""
        stored = super().shards().items()
        shards = {file: listed for file, listed in stored if listed or not file.match(OTHER_COPY)}
        for name in pickled.NAMES:
            shards = shards or {self.file(file.name): [] for file in sorted(self.folder.glob(name))}
        if not shards:
            suffixes = (".bin", ".pt", ".pth", ".safetensors")
            unread = sorted(file.name for file in self.folder.iterdir() if file.suffix in suffixes)
            only = f" (only {', '.join(unread[:3])})" if unread else ""
            raise ValueError(
                f"{self.path} has no safetensors file{only}; only safetensors, GGUF and pytorch_model*.bin "
                "are read"
            )
        return shards

    def tensors(self) -> Iterator[Any]:
        files = [*self.shards()]
        if any(map(files[0].match, pickled.NAMES)):
            return chain.from_iterable(map(pickled.read_pickled, files))
        return super().tensors()

    def file(self, name: str) -> Path:
        return file_inside(self.folder, name)

    def has_tokenizer(self) -> bool:
        return super().has_tokenizer() or (self.folder / TEKKEN).exists()

    def tokenizer(self) -> Any:
        if not self.has_tokenizer():
            return None if self.fill is None else toy_tokenizer()
        from transformers import PreTrainedTokenizerFast

        with library_errors(f"{self.path}: transformers cannot read the tokenizer"):
            self._check_tokenizer_config()
            tokenizer = super().tokenizer() if super().has_tokenizer() else self._read_tekken()
            if type(tokenizer).__name__.startswith("MistralCommon"):
                # Where mistral-common is installed: its own tokenizers have no chat template.
                tokenizer = PreTrainedTokenizerFast.from_pretrained(self.path, local_files_only=True)
        tokenizer = guarded(tokenizer, self.path)
        tokenizer.clean_up_tokenization_spaces = False
        if tokenizer.chat_template is None:  # where models that read images have it
            tokenizer.chat_template = read_json(self.folder / "chat_template.json").get("chat_template")
        return tokenizer

    def _read_tekken(self) -> Any:
        """As transformers converts it, with mistral-common where a file does not list its special tokens."""
        from tokenizers.processors import TemplateProcessing
        from transformers.integrations.mistral import convert_tekken_tokenizer

        try:
            tokenizer = convert_tekken_tokenizer(str(self.folder / TEKKEN))
        except ImportError as error:
            raise ValueError(
                f"{TEKKEN} cannot be read alone; install mistral-common, or name another tokenizer with "
                "tokenizer='...'"
            ) from error
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
        return tokenizer

    def _check_tokenizer_config(self) -> None:
        """Raise ValueError if transformers would open a file elsewhere or load what is no tokenizer."""
        file = self.folder / "tokenizer_config.json"
        settings = read_json(file)
        for name in (self.config.get("tokenizer_class"), settings.get("tokenizer_class")):
            if name is not None and not TOKENIZER_CLASS.fullmatch(str(name)):
                raise ValueError(f"{self.path}: tokenizer_class cannot be {name!r:.100}")
        for key, value in settings.items():
            # Many have the path of a special_tokens_map_file on the author's machine. It is never opened.
            names_file = key in FILE_SETTINGS or (key.endswith("_file") and key != "special_tokens_map_file")
            if names_file and value is not None:
                raise ValueError(f"{file}: {key} cannot be {value!r:.100}; files have fixed names")
        stored = [file_inside(self.folder, name) for name in settings.get("fast_tokenizer_files", [])]
        for file in (self.folder / "tokenizer.json", *stored):
            if file.exists() and VOCAB_IS_TEXT.search(file.read_bytes()):
                raise ValueError(f"{file}: the vocabulary cannot be the name of a file")


def file_inside(folder: Path, name: str) -> Path:
    """The file of this name. Raises ValueError unless it is regular, in the folder, and not too large."""
    # It may be no text, too long, or lead to itself.
    with library_errors(f"{folder}: cannot open {name!r}"):
        path = folder / name
        inside, regular = leads_inside(folder, path), path.is_file()
    if not inside:
        raise ValueError(f"{folder}: {name!r} leads out of the folder")
    if not regular:
        raise ValueError(f"{path} is missing, or is not a regular file")
    limit = MAX_BYTES.get(path.name, MAX_BYTES.get(path.suffix, math.inf))
    if path.stat().st_size > limit:
        raise ValueError(f"{path} is larger than {limit} bytes")
    return path


def leads_inside(folder: Path, path: Path) -> bool:
    """Whether a path, after following links, is in the folder. Raises OSError or RuntimeError for a cycle."""
    root = folder.resolve()
    places = [root]
    if root.parent.name == "snapshots":  # of the hub's cache, which has folders of links to its `blobs`
        places.append(root.parents[1] / "blobs")
    return any(path.resolve().is_relative_to(place) for place in places)


def checked_size(checkpoint: Checkpoint, config: ModelConfig, stored_bytes: int) -> ModelConfig:
    """The configuration. Raises ValueError if it is of a model that its files are too small for."""
    if checkpoint.fill is None and least_bits(config) > 8 * max(stored_bytes, LEAST_BYTES):
        raise ValueError(f"{checkpoint.source} describes a larger model than its files can hold")
    return config


def least_bits(config: ModelConfig) -> int:
    """Of all matrices, in the smallest format that they may have."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    # Rows of a layer's matrices that have `hidden_size` columns, or the other way round.
    layer_width = heads * config.head_dim + 3 * config.intermediate_size
    widths, experts = config.num_hidden_layers * layer_width, config.experts
    if experts:
        num_sparse = sum(map(experts.replaces_mlp, range(config.num_hidden_layers)))
        sparse_width = experts.num_experts * experts.moe_intermediate_size
        widths += num_sparse * 3 * (sparse_width - config.intermediate_size)
    bits = 8
    if format := config.quantization_config:
        # GGUF's smallest types take between one and two bits a weight.
        bits = 1 if format.get("quant_method") == "gguf" else 4
    return bits * config.hidden_size * (config.vocab_size + widths)
