"""Checks of files that somebody else has written: no name leads out of their folder, no file is too large to
read, and no configuration describes a larger model than its files can hold.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from nanovllm.checkpoints.model_config import ModelConfig

# By name or ending; several times what the largest models have. JSON takes many times its size in memory.
MAX_BYTES = {"tokenizer.json": 2**26, ".json": 2**24, ".jinja": 2**20, ".safetensors": math.inf}
MAX_BYTES_OF_OTHERS = 2**28


def check_room(source: str, config: ModelConfig, stored: int, bits: int) -> None:
    """
    Raise ValueError unless files of `stored` bytes can hold the matrices of a model, at `bits` a weight, the
    fewest that any format needs. If they cannot, a small file could make us allocate any amount of memory.
    """
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    layers, experts = config.num_hidden_layers, config.experts
    num_sparse = sum(map(experts.replaces_mlp, range(layers))) if experts else 0
    widths = layers * heads * config.head_dim + (layers - num_sparse) * 3 * config.intermediate_size
    if experts:
        widths += num_sparse * experts.num_experts * 3 * experts.moe_intermediate_size
    weights = config.hidden_size * (config.vocab_size + widths)
    if weights * bits > 8 * max(stored, 2**24):
        raise ValueError(f"{source} describes a larger model than its files can hold")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds, {} if there is no such file. Raises ValueError naming the file."""
    try:
        value = json.loads(file.read_bytes()) if file.exists() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def file_inside(folder: Path, name: str) -> Path:
    """The file of this name. Raises ValueError unless it is regular, in the folder, and not too large."""
    try:
        path = folder / name
        inside, regular = leads_inside(folder, path), path.is_file()
    # No text, a name too long, a zero byte, a cycle of links.
    except (TypeError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{folder}: cannot open {name!r}: {error}") from error
    if not inside:
        raise ValueError(f"{folder}: {name!r} leads out of the folder")
    if not regular:
        raise ValueError(f"{path} is missing, or is not a regular file")
    limit = MAX_BYTES.get(path.name, MAX_BYTES.get(path.suffix, MAX_BYTES_OF_OTHERS))
    if path.stat().st_size > limit:
        raise ValueError(f"{path} is larger than {limit} bytes")
    return path


def leads_inside(folder: Path, path: Path) -> bool:
    """Whether a path, after following links, is in the folder. Raises OSError or RuntimeError for a cycle."""
    root = folder.resolve()
    if path.resolve().is_relative_to(root):
        return True
    # The hub's cache has files in `blobs`, and beside that folder `snapshots`, with folders of links to them.
    if not path.is_symlink() or root.parent.name != "snapshots":
        return False
    target = os.path.normpath(path.parent.resolve() / os.readlink(path))
    return Path(target).parent == root.parent.parent / "blobs"
