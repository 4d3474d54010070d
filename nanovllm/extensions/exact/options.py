"""What an exact engine can be made of; all else is refused before weights are read."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.kernels.runtime import HAVE_TRITON

ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "SmolLM3ForCausalLM",
)
FORMATS = "dense", "fp8"
DTYPES = {"cuda": ("bfloat16", "float16"), "cpu": ("float32", "bfloat16")}
BACKENDS = {"cuda": ("auto", "triton"), "cpu": ("auto", "torch")}
CACHES = "auto", "bfloat16", "float16", "int8"  # of GPUs
MAX_HEAD_DIM = 128  # of the kernels


def check_exact(config: Config, formats: Collection[str]) -> None:
    """
    Raise ValueError naming what of a complete Config cannot be exact. `formats` are those of its weights, as
    `Scheme.kinds` has them, or "dense".
    """
    model, device = config.hf_config, config.device_of(0).type
    needs("attention_backend", [config.attention_backend], BACKENDS[device])
    needs("dtype", [str(config.torch_dtype).removeprefix("torch.")], DTYPES[device])
    if model.architectures:
        needs("the architecture", model.architectures, ARCHITECTURES)
    else:  # see `backend_check`, which comes before ranks are connected
        needs("tensor_parallel_size", [config.tensor_parallel_size], [1])
    needs("the weights' format", formats, FORMATS)
    if any(windows := [*map(model.window, range(model.num_hidden_layers))]):
        length = min(filter(None, windows))
        raise ValueError(f"exact=True needs max_model_len of at most {length}, which is the model's window")
    if device == "cuda":
        if not HAVE_TRITON:
            raise ValueError("exact=True needs the package triton on a GPU")
        needs("kv_cache_dtype", [config.kv_cache_dtype], CACHES)
        if model.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"exact=True needs head_dim of at most {MAX_HEAD_DIM}, got {model.head_dim}")
    elif not torch.backends.mkldnn.is_available():
        raise ValueError("exact=True needs oneDNN on a CPU, which this torch is built without")


def needs(what: str, given: Iterable[Any], allowed: Collection[Any]) -> None:
    for each in given:
        if each not in allowed:
            raise ValueError(f"exact=True needs {what} to be one of {list(allowed)}, got {each!r}")
