"""Where a model comes from: a folder of safetensors files, a GGUF file, or only the name of a shape.

The rest of the engine asks a checkpoint for its configuration, tokenizer and tensors, and does not know of
which kind it is. Checkpoints are other people's files: nothing in them is executed, and no name or link in a
folder leads out of it.
"""

import os
from typing import Any

from nanovllm.checkpoints.adapter import open_adapter
from nanovllm.checkpoints.base import Checkpoint
from nanovllm.checkpoints.folder import FolderCheckpoint
from nanovllm.checkpoints.gguf import GGUFCheckpoint
from nanovllm.checkpoints.hub import download
from nanovllm.checkpoints.shapes import SHAPES, ShapeCheckpoint
from nanovllm.checkpoints.smollm2 import fetch_smollm2

# Checkpoints of every kind have, besides what `Checkpoint` gives them:
#   hf_config()    their ModelConfig, for an option `model_impl`
#   tokenizer()    a transformers tokenizer, or None
#   tensors()      if weights are not random: objects with `name` (Hugging Face's), `file` and `shape`; slices
#                  are torch tensors, read when they are taken


def open_checkpoint(
    model: str | os.PathLike, load_format: str = "auto", tokenizer: str | os.PathLike | None = None,
    hf_overrides: dict[str, Any] | None = None, hub: dict[str, Any] | None = None,
    lora: str | os.PathLike | None = None,
) -> Checkpoint:  # fmt: skip
    """
    Find a checkpoint without reading its weights. `model` is a folder, a `.gguf` file, a Hugging Face hub id,
    "smollm2" or, with load_format="dummy", one of `SHAPES`. Another `tokenizer` is in such a place, too.
    A `lora` adapter is a folder or a hub id. `hub` has options for downloads. Raises ValueError that says
    what was looked for.
    """
    hub = {name: value for name, value in (hub or {}).items() if value is not None}
    checkpoint = _find(model, load_format, hub)
    if hf_overrides:
        checkpoint.override(hf_overrides)
    hub.pop("revision", None)  # is the model's
    if lora is not None:
        checkpoint.adapter = open_adapter(lora, hub)
    if tokenizer is not None and os.fspath(tokenizer) != os.fspath(model):
        try:
            checkpoint.tokenizer_source = _find(tokenizer, "auto", hub, only_tokenizer=True)
        except ValueError as error:
            raise ValueError(f"tokenizer: {error}") from error
    return checkpoint


def _find(
    model: str | os.PathLike, load_format: str, hub: dict[str, Any], only_tokenizer: bool = False
) -> Checkpoint:
    dummy = load_format == "dummy"
    name = os.fspath(model)
    path = os.path.abspath(os.path.expanduser(name))
    if not name or not os.path.exists(path):
        if name in SHAPES and dummy:
            return ShapeCheckpoint(name, dummy)
        weights = not dummy and not only_tokenizer
        path = str(fetch_smollm2()) if name == "smollm2" else download(name, weights, **hub)
    if os.path.isfile(path):
        if load_format == "safetensors" or not path.lower().endswith(".gguf"):
            raise ValueError(f"model {name!r} is neither a folder nor, for load_format='gguf', a .gguf file")
        return GGUFCheckpoint(path, dummy)
    if load_format == "gguf":
        raise ValueError(f"model {name!r} is a folder, but load_format='gguf' reads a .gguf file")
    if not os.path.isdir(path):
        raise ValueError(f"model {name!r} is neither a folder nor a regular file")
    return FolderCheckpoint(path, dummy, only_tokenizer)
