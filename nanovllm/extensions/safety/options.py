"""The options that extensions serve; some checks know better than "is not allowed"."""

import os
import warnings
from collections.abc import Collection
from typing import Any

import torch

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.config import CHECKS, DTYPES, Check, Config, one_of
from nanovllm.utils.validation import check_bool, shown

# Formats that other engines want to be told, and this one finds in the checkpoint.
FOUND_FORMATS = "compressed-tensors gptq gptq_marlin awq awq_marlin auto-round gguf bitsandbytes".split()
OTHER_NAMES = {"half": "float16", "float": "float32"}  # of dtypes


def none_or(kind: str, *classes: type) -> Check:
    def check_class(value: Any, name: str) -> Any:
        if not isinstance(value, (*classes, type(None))):
            raise ValueError(f"{name} must be None or {kind}, got {shown(value)}")
        return value

    return check_class


def dtype_name(*allowed: str) -> Check:
    """Also given as a dtype of torch, or by another name."""

    def check_dtype(value: Any, name: str) -> str:
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        if isinstance(value, str):
            value = OTHER_NAMES.get(value, value)
        return one_of("auto", *allowed)(value, name)

    return check_dtype


def check_cache_dtype(value: Any, name: str) -> str:
    if isinstance(value, str) and value.startswith("fp8"):
        raise ValueError(
            f"kv_cache_dtype={value!r} is not offered: 'int8' takes as many bytes, is "
            "7 to 30 times closer to a bfloat16 cache (KL divergence of the next token's distribution), "
            "and has nothing to calibrate: each token and head gets its scale when it is stored"
        )
    return dtype_name(*DTYPES, "int8")(value, name)


def check_quantization(value: Any, name: str) -> str | None:
    if isinstance(value, str) and value in FOUND_FORMATS:
        raise ValueError(
            f"quantization={value!r} is to be left out: the format of quantised weights is "
            "found in the checkpoint, and 'fp8' and 'int4' make them from others"
        )
    return None if value is None else one_of("fp8", "int4")(value, name)


def check_logprobs_mode(value: Any, name: str) -> str:
    """Also by the names that they have in vLLM."""
    if isinstance(value, str):
        value = value.removesuffix("_logprobs")
    return one_of("raw", "processed")(value, name)


def check_extensions(value: Any, name: str) -> Any:
    """A list, or in a command line names with commas between."""
    given = value.split(",") if isinstance(value, str) else value
    return none_or("a list of objects or 'package.module:Name'", list, tuple)(given, name)


class ExtendedConfig(Config):
    """All options are served."""

    checks = {
        **CHECKS,
        "dtype": dtype_name(*DTYPES),
        "load_format": one_of("auto", "safetensors", "gguf", "dummy"),
        "model_impl": one_of("auto", "native", "transformers"),
        "kv_cache_dtype": check_cache_dtype,
        "quantization": check_quantization,
        "activation_dtype": one_of("auto", "fp8"),
        "logprobs_mode": check_logprobs_mode,
        "exact": check_bool,
        "tokenizer": none_or("a name or a path", str, os.PathLike),
        "hf_overrides": none_or("a dict of fields of config.json", dict),
        "revision": none_or("a text", str),
        "download_dir": none_or("a path", str, os.PathLike),
        "token": none_or("a text", str, bool),
        "lora": none_or("a folder or hub id of an adapter", str, os.PathLike),
        "timeline": none_or("a path", str, os.PathLike),
        "extensions": check_extensions,
    }

    def with_checkpoint(self, checkpoint: Checkpoint, given: Collection[str] = ()) -> Config:
        """Of options that were `given`, not defaults, it is said if they are cut."""
        config = super().with_checkpoint(checkpoint)
        length, limit = self.max_model_len, config.max_model_len
        if "max_model_len" in given and length is not None and length > limit:
            message = f"max_model_len={length} is cut to {limit}, which is the checkpoint's own limit"
            warnings.warn(message, stacklevel=5)
        return config
