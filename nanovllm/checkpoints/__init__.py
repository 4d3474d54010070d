"""Where a model comes from: a folder of safetensors files, a GGUF file, or only the name of a shape.

The rest of the engine asks a checkpoint for its configuration, tokenizer and tensors, and does not know of
which kind it is. Checkpoints are other people's files: nothing in them is executed, and no name or link in a
folder leads out of it.
"""

import os
from typing import Any

from nanovllm.checkpoints.folder import FolderCheckpoint
from nanovllm.checkpoints.hub import download
from nanovllm.checkpoints.shapes import SHAPES, ShapeCheckpoint
from nanovllm.checkpoints.smollm2 import fetch_smollm2

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def open_checkpoint(model: str | os.PathLike, load_format: str = "auto") -> Any:
    """
    Find a checkpoint without reading its weights. `model` is a folder, a `.gguf` file, a Hugging Face hub id,
    "smollm2" or, with load_format="dummy", one of `SHAPES`. Raises ValueError that says what was looked for.

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
        path = str(fetch_smollm2()) if name == "smollm2" else download(name, weights=not dummy)
    if os.path.isfile(path):
        if load_format == "safetensors" or not path.lower().endswith(".gguf"):
            raise ValueError(f"model {name!r} is neither a folder nor, for load_format='gguf', a .gguf file")
        from nanovllm.checkpoints.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path, dummy)
    if load_format == "gguf":
        raise ValueError(f"model {name!r} is a folder, but load_format='gguf' reads a .gguf file")
    if not os.path.isdir(path):
        raise ValueError(f"model {name!r} is neither a folder nor a regular file")
    return FolderCheckpoint(path, dummy)
