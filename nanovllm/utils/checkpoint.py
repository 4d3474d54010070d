"""Where a model comes from: a folder of safetensors files, a GGUF file, or only the name of a shape.

The rest of the engine asks a checkpoint for its configuration, tokenizer and tensors, and does not know of
which kind it is. Checkpoints are other people's files: nothing in them is executed, and no name or link in a
folder leads out of it.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.utils.tokenizer import guard_decode, tokenizer_errors, toy_tokenizer

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

# name -> hidden_size, layers, heads, KV heads, intermediate_size, tied embeddings
SHAPES = {
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, True),
    "qwen3-4b": (2560, 36, 32, 8, 9728, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, False),
    "qwen3-32b": (5120, 64, 64, 8, 25600, False),
}

# No real model comes near these limits; what exceeds them would be noticed when memory has run out.
COUNTS = "num_attention_heads num_key_value_heads".split()
SIZES = "hidden_size intermediate_size vocab_size max_position_embeddings head_dim".split()
SIZE_LIMITS = {"num_hidden_layers": 2**10, **dict.fromkeys(COUNTS, 2**12), **dict.fromkeys(SIZES, 2**24)}
CONFIG_DEFAULTS = {
    "architectures": [],
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {},
    "rope_scaling": {},
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
# Several times what the largest models have: whoever reads JSON needs many times the memory of the file.
MAX_BYTES = {
    "config.json": 2**20,
    "generation_config.json": 2**20,
    "tokenizer_config.json": 2**22,
    "special_tokens_map.json": 2**22,
    "added_tokens.json": 2**22,
    "model.safetensors.index.json": 2**24,
    "tokenizer.json": 2**26,
    "vocab.json": 2**26,
    ".jinja": 2**20,
    ".safetensors": math.inf,
}
MAX_BYTES_OF_OTHERS = 2**28

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
FOLDER_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".spm", ".codes", ".tokenizer")
TEMPLATE_FOLDER = "additional_chat_templates"
# transformers takes any of its classes by name: others read pickles, or ask whether to run the folder's code.
TOKENIZER_CLASS = re.compile(r"(?!Auto)\w+(Tokenizer|TokenizerFast|Backend)")
# What some of these classes take for the names of files to open, besides every setting that ends in _file.
FILE_SETTINGS = ("vocab", "merges", "source_spm", "target_spm")
# A text where tokenizer.json has its vocabulary, however the key is spelled, is such a name too.
VOCAB_IS_TEXT = re.compile(rb'"(?:v|\\u0076)(?:o|\\u006[fF])(?:c|\\u0063)(?:a|\\u0061)(?:b|\\u0062)"\s*:\s*"')


def open_checkpoint(model: str | os.PathLike, load_format: str = "auto") -> Any:
    """
    Find a checkpoint without reading its weights. `model` is a folder, a `.gguf` file, a Hugging Face hub id
    or, with load_format="dummy", one of `SHAPES`. Raises ValueError that says what was looked for.

    A checkpoint has
      path                      what opens it again, in any process, without asking the hub
      random_weights            whether weights are made up ("dummy") instead of read
      hf_config()               the fields of config.json, as attributes
      tokenizer()               a transformers tokenizer, or None
      eos_token_ids(tokenizer)  every token id that ends a sequence
      tensors()                 objects with `name` (Hugging Face's), `file` and `shape`; slices are torch
                                tensors, read when they are taken
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {list(LOAD_FORMATS)}, got {load_format!r}")
    dummy = load_format == "dummy"
    name = os.fspath(model)
    path = os.path.abspath(os.path.expanduser(name))
    if not name or not os.path.exists(path):
        if name in SHAPES and dummy:
            return ShapeCheckpoint(name)
        path = _download(name, weights=not dummy)
    if os.path.isfile(path):
        if load_format == "safetensors" or not path.lower().endswith(".gguf"):
            raise ValueError(f"model {name!r} is neither a folder nor, for load_format='gguf', a .gguf file")
        from nanovllm.utils.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path, dummy)
    if load_format == "gguf":
        raise ValueError(f"model {name!r} is a folder, but load_format='gguf' reads a .gguf file")
    if not os.path.isdir(path):
        raise ValueError(f"model {name!r} is neither a folder nor a regular file")
    return FolderCheckpoint(path, dummy)


class FolderCheckpoint:
    """A local folder in Hugging Face's layout."""

    def __init__(self, path: str, random_weights: bool = False):
        self.path = path
        self.random_weights = random_weights
        self.folder = Path(path)
        for entry in [*self.folder.iterdir(), *self.folder.glob(f"{TEMPLATE_FOLDER}/*")]:
            if entry.suffix in FOLDER_SUFFIXES:
                _file_inside(self.folder, str(entry.relative_to(self.folder)))
            elif entry.is_symlink() and not _leads_inside(self.folder, entry):  # a folder, perhaps
                raise ValueError(f"{self.folder}: {entry.name!r} leads out of the folder")
        if not (self.folder / "config.json").exists():
            hint = "; name the .gguf file itself to load it" if any(self.folder.glob("*.gguf")) else ""
            raise ValueError(f"{path} has no config.json{hint}")
        self.config = read_json(self.folder / "config.json")

    def hf_config(self) -> Any:
        config = build_config(self.folder / "config.json", self.config)
        stored = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
        if not self.random_weights and not has_room_for(config, stored):
            self._shards()  # has more to say where there are none
            raise ValueError(
                f"{self.folder / 'config.json'} describes a larger model than its files can hold"
            )
        return config

    def tokenizer(self) -> Any:
        if not any((self.folder / name).exists() for name in TOKENIZER_FILES):
            return toy_tokenizer() if self.random_weights else None
        self._check_tokenizer_config()
        from transformers import AutoTokenizer

        with tokenizer_errors(f"{self.path}: transformers cannot read the tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
        return guard_decode(tokenizer, self.path)

    def _check_tokenizer_config(self) -> None:
        """Raise ValueError if transformers would open a file elsewhere or use what is no tokenizer."""
        file = self.folder / "tokenizer_config.json"
        settings = read_json(file) if file.exists() else {}
        for name in (self.config.get("tokenizer_class"), settings.get("tokenizer_class")):
            if name is not None and not (isinstance(name, str) and TOKENIZER_CLASS.fullmatch(name)):
                raise ValueError(f"{self.path}: tokenizer_class cannot be {name!r:.100}")
        for key, value in settings.items():
            # Many name a special_tokens_map_file on their author's machine, which nobody opens.
            names_file = key in FILE_SETTINGS or (key.endswith("_file") and key != "special_tokens_map_file")
            if names_file and value is not None:
                raise ValueError(f"{file}: {key} cannot be {value!r:.100}; files have fixed names")
        versions = settings.get("fast_tokenizer_files", [])
        if not isinstance(versions, list) or not all(isinstance(name, str) for name in versions):
            raise ValueError(f"{file}: fast_tokenizer_files must be a list of names, got {versions!r:.100}")
        stored = [_file_inside(self.folder, name) for name in versions]
        for file in (self.folder / "tokenizer.json", *stored):
            if file.exists() and VOCAB_IS_TEXT.search(file.read_bytes()):
                raise ValueError(f"{file}: the vocabulary cannot be the name of a file")

    def generation_config(self) -> dict[str, Any]:
        file = self.folder / "generation_config.json"
        return read_json(file) if file.exists() else {}

    def eos_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        generation = self.generation_config()
        # Not from the transformers configuration, which fills in a default that the model may not have.
        found = generation.get("eos_token_id"), self.config.get("eos_token_id")
        return merge_eos_ids(self.path, *found, getattr(tokenizer, "eos_token_id", None))

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
        """Files with weights -> the tensors that the index lists for them; none where there is no index."""
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            files = sorted(self.folder.glob("*.safetensors"))
            if not files:
                others = sorted(
                    file.name for ending in ("bin", "pt", "pth") for file in self.folder.glob(f"*.{ending}")
                )
                instead = f" (only {', '.join(others[:3])})" if others else ""
                raise ValueError(
                    f"{self.path} has no safetensors file{instead}; only safetensors and GGUF are read"
                )
            return {file: [] for file in files}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index}: weight_map must say the file of each tensor")
        shards: dict[str, list[str]] = {}
        for tensor, file in weight_map.items():
            shards.setdefault(file, []).append(tensor)
        return {_file_inside(self.folder, file): listed for file, listed in sorted(shards.items())}


class SafetensorsTensor:
    """One tensor of a safetensors file. A slice is a view of the mapped file: no other part of it is read."""

    def __init__(self, file: str, name: str, stored: Any):
        self.file = file
        self.name = name
        self.shape = tuple(stored.get_shape())
        self._stored = stored
        if stored.get_dtype() not in ("F16", "BF16", "F32", "F64"):
            raise ValueError(
                f"{file}: tensor {name} has dtype {stored.get_dtype()}; only F16, BF16, F32 and F64 are read"
            )

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._stored[index]


class ShapeCheckpoint:
    """The sizes of a well-known model, for measuring speed without downloading anything."""

    random_weights = True

    def __init__(self, name: str):
        self.path = name

    def hf_config(self) -> Any:
        hidden_size, layers, heads, kv_heads, intermediate_size, tied = SHAPES[self.path]
        return build_config(
            self.path,
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "hidden_size": hidden_size,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": 128,
                "intermediate_size": intermediate_size,
                "vocab_size": 151936,
                "max_position_embeddings": 40960,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "tie_word_embeddings": tied,
                "dtype": "bfloat16",
            },
        )

    def tokenizer(self) -> Any:
        return toy_tokenizer()

    def generation_config(self) -> dict[str, Any]:
        return {}

    def eos_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        return merge_eos_ids(self.path, getattr(tokenizer, "eos_token_id", None))

    def tensors(self) -> Iterator[Any]:
        return iter(())


def build_config(source: str | Path, raw: dict[str, Any]) -> SimpleNamespace:
    """
    What a config.json holds, as attributes, with transformers' defaults for fields it may leave out. Raises
    ValueError. Not transformers' own class: importing those takes longer than loading a small model.
    """
    from nanovllm.models import get_model_class

    config = SimpleNamespace(**{**CONFIG_DEFAULTS, **{k: v for k, v in raw.items() if v is not None}})
    try:
        get_model_class(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    dtype = raw.get("dtype") or raw.get("torch_dtype")  # the second is the older spelling
    config.dtype = str(dtype).removeprefix("torch.") if dtype else None
    for field, limit in SIZE_LIMITS.items():
        value = getattr(config, field, None)
        if value is None and field == "num_key_value_heads":
            value = config.num_attention_heads
        if value is None and field == "head_dim":
            qwen3 = "Qwen3ForCausalLM" in config.architectures
            value = 128 if qwen3 else config.hidden_size // config.num_attention_heads
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{source}: {field} must be an integer from 1 to {limit}, got {value!r}")
        setattr(config, field, value)
    kinds = {field: type(default) for field, default in CONFIG_DEFAULTS.items()}
    for field, kind in {**kinds, "rms_norm_eps": (int, float), "rope_theta": (int, float)}.items():
        value = getattr(config, field)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{source}: {field} cannot be {value!r:.100}")
    if not 0 <= config.rms_norm_eps <= 1:
        raise ValueError(f"{source}: rms_norm_eps cannot be {config.rms_norm_eps!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{source}: num_key_value_heads must divide num_attention_heads, which is "
            f"{config.num_attention_heads}, got {config.num_key_value_heads}"
        )
    _check_rotation(source, config)
    return config


def _check_rotation(source: str | Path, config: SimpleNamespace) -> None:
    """Raise ValueError unless the rotary settings make a table of numbers, which a table of two shows."""
    from nanovllm.layers.rotary_embedding import context_limit, get_rope, rope_parameters

    settings = rope_parameters(config)
    try:
        if not all(math.isfinite(value) for value in settings.values() if isinstance(value, float)):
            raise ValueError("they are not all finite")
        if config.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {config.head_dim}")
        if not get_rope(config.head_dim, 2, settings).cos_sin_cache.isfinite().all():
            raise ValueError("they give angles that are no numbers")
        if context_limit(config) > (most := SIZE_LIMITS["max_position_embeddings"]):
            raise ValueError(f"they extend the context beyond {most} positions")
    except Exception as error:  # whatever values of any kind and size provoke in there
        raise ValueError(f"{source}: rotary settings {settings!r:.300}: {error}") from error


def has_room_for(config: SimpleNamespace, stored: int, bits: int = 8) -> bool:
    """
    Whether the matrices of a model fit in `stored` bytes if a weight takes `bits`, which shall be less than
    any format needs: a configuration must not make us allocate what no file can fill.
    """
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    per_layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    weights = config.vocab_size * config.hidden_size + config.num_hidden_layers * per_layer
    return weights * bits <= 8 * max(stored, 2**24)


def merge_eos_ids(source: str, *values: Any) -> tuple[int, ...]:
    """All token ids in `values`, each of which is an id, a list of ids or None."""
    token_ids = [
        i for value in values for i in (value if isinstance(value, list) else [value]) if i is not None
    ]
    for token_id in token_ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(
                f"{source}: eos_token_id must be one token id or a list of them, got {token_id!r}"
            )
    return tuple(dict.fromkeys(token_ids))


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ValueError naming the file."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _file_inside(folder: Path, name: str) -> Path:
    """A file of the folder by its name. Raises ValueError unless it is regular, inside, and not huge."""
    path = folder / name
    try:
        inside = _leads_inside(folder, path)
        regular = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, a cycle of links
        raise ValueError(f"{folder}: cannot open {name!r}: {error}") from error
    if not inside:
        raise ValueError(f"{folder}: {name!r} leads out of the folder")
    if not regular:
        raise ValueError(f"{path} is missing, or is not a regular file")
    limit = MAX_BYTES.get(path.name, MAX_BYTES.get(path.suffix, MAX_BYTES_OF_OTHERS))
    if path.stat().st_size > limit:
        raise ValueError(f"{path} is larger than {limit} bytes")
    return path


def _leads_inside(folder: Path, path: Path) -> bool:
    """Raises OSError or RuntimeError for a cycle of links."""
    root = folder.resolve()
    if path.resolve().is_relative_to(root):
        return True
    # The hub's cache keeps contents in `blobs`, and beside it `snapshots` with folders of links to them.
    if not path.is_symlink() or root.parent.name != "snapshots":
        return False
    target = os.path.normpath(path.parent.resolve() / os.readlink(path))
    return Path(target).parent == root.parent.parent / "blobs"


def _download(name: str, weights: bool) -> str:
    """The local folder of a hub id, from the cache or the network. Raises ValueError."""
    if not HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise ValueError(
            f"model {name!r}: there is no such folder or .gguf file, and it is not a hub id ('owner/name') "
            f"or, with load_format='dummy', one of {list(SHAPES)}"
        )
    from huggingface_hub import snapshot_download

    patterns = [*HUB_FILES, "*.safetensors"] if weights else list(HUB_FILES)
    try:
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"])
    except Exception as error:  # unknown, private or gated; no network and not in the cache; disk full
        raise ValueError(
            f"model {name!r}: there is no such folder, and the hub does not give it: {error}"
        ) from error
