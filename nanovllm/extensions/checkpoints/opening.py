"""Opens what the user names: a folder, a `.gguf` file, an id of the hub, or a model known by a short name."""

import functools
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.extensions.checkpoints.library_errors import library_errors
from nanovllm.extensions.checkpoints.made_up import SHAPES, ShapeCheckpoint, fill_with_random_values
from nanovllm.extensions.checkpoints.names import with_names_of
from nanovllm.extensions.checkpoints.text_part import open_text_part
from nanovllm.extensions.checkpoints.untrusted import CheckedFolder
from nanovllm.utils.validation import check


def open_checkpoint(
    config: Config, models: Collection[Any], read_config: Callable[..., ModelConfig]
) -> Checkpoint:
    """
    Open the checkpoint that an engine's options name, without reading its weights. `model` is a folder, a
    `.gguf` file, a Hugging Face hub id or a GGUF file there (see hub.py), "smollm2" or, with
    load_format="dummy", one of `SHAPES`. Another `tokenizer` is in such a place, too. A `lora` adapter is a
    folder or a hub id. `models` are those that GGUF files may hold. Raises ValueError that says what was
    looked for.
    """
    downloads = {"revision": config.revision, "cache_dir": config.download_dir, "token": config.token}
    checkpoint = _open(config.model, config.load_format, downloads, models)
    checkpoint.read_config = read_config
    if isinstance(checkpoint, CheckedFolder):
        open_text_part(checkpoint)
    checkpoint.changes += (with_names_of,)
    if config.load_format == "dummy":
        checkpoint.fill = fill_with_random_values
    if config.hf_overrides:
        if not isinstance(checkpoint, CheckedFolder):
            raise ValueError(f"hf_overrides are for config.json, which {checkpoint.path!r} does not have")
        # The configuration of what also reads images is that of its text part by now.
        text = config.hf_overrides.get("text_config") or {}
        check(isinstance(text, dict), "hf_overrides: text_config must be an object", text)
        checkpoint.config = _overridden(checkpoint.config, config.hf_overrides | text)
    if config.activation_dtype != "auto":
        checkpoint.read_config = functools.partial(_with_activations, read_config, config.activation_dtype)
    del downloads["revision"]  # is the model's
    if config.lora is not None:
        from nanovllm.extensions.checkpoints.adapter import add_adapter

        add_adapter(checkpoint, config.lora, downloads)
    if config.tokenizer not in (None, config.model):
        with library_errors("tokenizer"):
            other = _open(os.fspath(config.tokenizer), "auto", downloads, models, only_tokenizer=True)
        checkpoint.tokenizer = other.tokenizer
    return checkpoint


def _overridden(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """
    The fields of a configuration with others in their place. Where it has all rotary settings in
    `rope_parameters`, as transformers 5 writes them, the older names of fields mean a part of that.
    """
    rope, others = fields.get("rope_parameters"), dict(overrides)
    if not isinstance(rope, dict) or "rope_parameters" in others:
        return fields | others
    full = rope.get("full_attention")  # beside those of layers with a window
    full = full if isinstance(full, dict) else rope
    scaling = others.pop("rope_scaling", full) or {}
    check(isinstance(scaling, dict), "hf_overrides: rope_scaling must be an object", scaling)
    kept = {"rope_theta", "partial_rotary_factor"} & full.keys()
    found = {name: full[name] for name in kept} | scaling
    if "rope_theta" in others:
        found["rope_theta"] = others.pop("rope_theta")
    return fields | others | {"rope_parameters": found if full is rope else rope | {"full_attention": found}}


def _with_activations(read: Callable[..., ModelConfig], dtype: str, *source: Any) -> ModelConfig:
    """What is read of the model, whose weights' format is to have activations of this dtype."""
    model = read(*source)
    quantization = model.quantization_config or {}
    return replace(model, quantization_config={**quantization, "activation_dtype": dtype})


def _open(
    name: str,
    load_format: str,
    downloads: dict[str, Any],
    models: Collection[Any],
    only_tokenizer: bool = False,
) -> Checkpoint:
    dummy = load_format == "dummy"
    path = os.path.abspath(os.path.expanduser(name))
    if not name or not os.path.exists(path):
        if name in SHAPES and dummy:
            return ShapeCheckpoint(name)
        if name == "smollm2":
            from nanovllm.extensions.checkpoints.smollm2 import fetch_smollm2

            path = str(fetch_smollm2())
        else:
            from nanovllm.extensions.checkpoints.hub import download

            path = download(name, not dummy and not only_tokenizer, **downloads)
    if os.path.isdir(path):
        if load_format == "gguf":
            raise ValueError(f"model {name!r} is a folder, but load_format='gguf' reads a .gguf file")
        return CheckedFolder(path, only_tokenizer)
    if load_format == "safetensors" or not (os.path.isfile(path) and path.lower().endswith(".gguf")):
        found = "is neither a folder nor a regular file that ends with .gguf"
        raise ValueError(f"model {name!r} {found}, for load_format={load_format!r}")
    from nanovllm.extensions.checkpoints.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path, models)
