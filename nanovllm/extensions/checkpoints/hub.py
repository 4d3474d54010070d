"""Checkpoints on the Hugging Face hub: downloads the files that are needed, unless they are in its cache."""

import glob
import re
from pathlib import Path
from typing import Any

from nanovllm.checkpoints.folder import INDEX, read_index
from nanovllm.extensions.checkpoints.shapes import SHAPES
from nanovllm.extensions.checkpoints.untrusted import OTHER_COPY, file_inside

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")


def download(name: str, weights: bool, **options: Any) -> str:
    """
    The local folder of a hub id, from the cache or the network. `options` are those of `snapshot_download`.
    Raises ValueError.
    """
    missing = f"model {name!r}: there is no such folder"
    known = f", a .gguf file, 'smollm2' or, with load_format='dummy', one of {list(SHAPES)}"
    folder = fetch(name, [*HUB_FILES], options, missing, known)
    if not weights:
        return folder
    path = Path(folder)
    if (path / INDEX).exists():
        file_inside(path, INDEX)
    listed = [glob.escape(file) for file in read_index(path)] or ["*.safetensors"]
    return fetch(name, [*HUB_FILES, *listed], options, missing)


def fetch(name: str, patterns: list[str], options: dict[str, Any], missing: str, known: str = "") -> str:
    """The same for files of these patterns. Errors say what is missing and which names are known besides."""
    from huggingface_hub import snapshot_download

    if not HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise ValueError(f"{missing}, and it is not a hub id ('owner/name'){known}")
    ignored = ["*/*", OTHER_COPY]
    try:
        return snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored, **options)
    except Exception as error:  # unknown, private or gated; no network and not in the cache; disk full
        raise ValueError(f"{missing}, and the hub does not give it: {error}") from error
