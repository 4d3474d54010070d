"""Every option of the engine, checked in one place before anything is loaded, and never changed again."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.utils.validation import MAX_INT, MIN_FLOAT, Check, check, check_bool, integer, number

MAX_GRID = 2**16 - 1  # of a kernel's second and third dimension
DEVICE = re.compile("auto|cpu|cuda(:[1-9]?[0-9])?")
DTYPES = "float32", "bfloat16", "float16"


def one_of(*allowed: str) -> Check:
    def check_choice(value: Any, name: str) -> str:
        # An array would compare its elements.
        check(isinstance(value, str) and value in allowed, f"{name} must be one of {list(allowed)}", value)
        return value

    return check_choice


def check_model(value: Any, name: str) -> str:
    check(isinstance(value, (str, os.PathLike)), f"{name} must be a name or a path", value)
    return str(value)


def check_block_size(value: Any, name: str) -> int:
    size = integer(16)(value, name)
    check(size % 16 == 0, f"{name} must be a multiple of 16", size)
    return size


def resolve_device(value: Any, name: str) -> str:
    """The device that "auto" stands for, or else the value itself."""
    device = str(value)
    is_name = isinstance(value, (str, torch.device)) and DEVICE.fullmatch(device)
    check(is_name, f"{name} must be 'auto', 'cpu', 'cuda' or 'cuda:N'", value)
    if device == "cpu" or torch.cuda.is_available():
        return device.replace("auto", "cuda")
    if device != "auto":
        raise ValueError(f"device={device!r} was asked for, but torch finds no CUDA device")
    return "cpu"


# Of each option that the core serves.
CHECKS = {
    "model": check_model,
    "max_num_batched_tokens": integer(1),
    "max_num_seqs": integer(1, MAX_GRID),
    "max_model_len": integer(1, MAX_INT, None),
    "gpu_memory_utilization": number(MIN_FLOAT, 1, "a number in (0, 1]"),
    "tensor_parallel_size": integer(1, 8),
    "enforce_eager": check_bool,
    "kvcache_block_size": check_block_size,
    "num_kvcache_blocks": integer(1, MAX_INT, -1),
    "device": resolve_device,
    "dtype": one_of("auto", *DTYPES),
    "load_format": one_of("auto", "safetensors"),
    "attention_backend": one_of("auto", "flash", "triton", "torch"),
    "kv_cache_dtype": one_of("auto", *DTYPES),
    "enable_prefix_caching": check_bool,
    "seed": integer(0, 2**63 - 1, None),
}


@dataclass(frozen=True)
class Config:
    """
    model:                  folder, `.gguf` file, hub id, "smollm2", or a shape such as qwen3-0.6b (dummy).
    max_num_batched_tokens: most prompt tokens computed in one step; longer prompts are computed in chunks.
    max_num_seqs:           most sequences running at once.
    max_model_len:          most tokens of prompt and completion; capped by the checkpoint's own limit, which
                            None stands for.
    gpu_memory_utilization: share of the whole card's memory that the engine may fill, in (0, 1].
    tensor_parallel_size:   ranks (GPUs, or processes on a CPU) that the model is split over, 1 to 8.
    enforce_eager:          never use CUDA graphs.
    hf_config:              filled in: the fields of the checkpoint's config.json.
    eos:                    filled in: the token ids that end a sequence.
    kvcache_block_size:     tokens per KV cache block, a multiple of 16 (flash-attn: of 256).
    num_kvcache_blocks:     filled in from the memory there is, unless given.
    device:                 "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
    dtype:                  "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
    load_format:            "auto", "safetensors", "gguf" or "dummy" (random weights).
    model_impl:             "auto", "native" (only classes of this project) or "transformers" (its modules).
    attention_backend:      "auto", "flash", "triton" or "torch".
    kv_cache_dtype:         "auto" (same as dtype), "float32", "bfloat16", "float16" or "int8".
    quantization:           None (weights stay as the checkpoint stores them), or "fp8" or "int4": made while
                            they are loaded.
    activation_dtype:       "auto" (same as dtype), or "fp8": int4 weights and experts in MXFP4 have
                            their inputs rounded to 8 bits.
    enable_prefix_caching:  share KV cache blocks between sequences that begin with the same tokens.
    seed:                   makes the sampling of the whole engine reproducible.
    logprobs_mode:          log-probabilities are "raw" (the model's own) or "processed" (of the
                            distribution that a token was drawn from).
    exact:                  a sequence gets the same logits, bit for bit, whatever is computed beside it;
                            see docs/exact.md.
    lora:                   folder or hub id of an adapter in PEFT's format, merged into the weights while
                            they are loaded.
    tokenizer:              folder, `.gguf` file or hub id with the tokenizer, if not with the model.
    hf_overrides:           fields of config.json to read as if the file had them.
    revision:               branch, tag or commit of a hub id.
    download_dir:           where files of the hub are kept; None is its usual cache.
    token:                  for the hub; None is the one that is logged in.
    extensions:             objects of your own that change the engine, or "package.module:Name" of such, in a
                            list; see docs/extending.md.
    timeline:               file to write what happened into when the engine ends: .html, a page that shows
                            it, or .json, a trace for Perfetto.

    Raises ValueError naming the option, its value and what is allowed. An option that no part of the engine
    serves, which is one without a check, must be left at its default.
    """

    checks: ClassVar[Mapping[str, Check]] = CHECKS

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    hf_config: ModelConfig | None = None
    eos: int | tuple[int, ...] = -1
    kvcache_block_size: int = 256
    num_kvcache_blocks: int = -1
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    model_impl: str = "auto"
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    activation_dtype: str = "auto"
    enable_prefix_caching: bool = True
    seed: int | None = None
    logprobs_mode: str = "raw"
    exact: bool = False
    lora: str | os.PathLike | None = None
    tokenizer: str | os.PathLike | None = None
    hf_overrides: dict[str, Any] | None = None
    revision: str | None = None
    download_dir: str | os.PathLike | None = None
    token: str | None = field(default=None, repr=False)
    timeline: str | os.PathLike | None = None
    extensions: str | Sequence[Any] | None = None

    def __post_init__(self) -> None:
        # A filled-in Config is a copy of one that was checked, and may be made in a forked process, which
        # cannot ask CUDA for its devices.
        if self.hf_config is not None:
            return
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if name in self.checks:
                object.__setattr__(self, name, self.checks[name](value, name))
            elif value is not option.default:
                raise ValueError(f"{name} must be {option.default!r}: no part of this engine serves it")

    def with_checkpoint(self, checkpoint: Checkpoint) -> "Config":
        """
        These options completed by what the checkpoint says of the model. Raises ValueError if they do not fit
        it.
        """
        hf_config = checkpoint.hf_config()
        limit = hf_config.context_limit
        length = min(self.max_model_len or limit, limit)
        hf_config = replace(hf_config, max_model_len=length)
        self._check_split(hf_config)
        return replace(self, model=checkpoint.path, hf_config=hf_config, max_model_len=length)

    def _check_split(self, hf_config: ModelConfig) -> None:
        """Raise ValueError unless the model can be split over the ranks, and there are so many devices."""
        size, vocab_size = self.tensor_parallel_size, hf_config.vocab_size
        kv_heads = hf_config.num_key_value_heads
        given = f"tensor_parallel_size={size}"
        for name, width in hf_config.divided_sizes.items():
            if width % size:
                raise ValueError(f"{given} must divide {name}, which is {width}")
        if kv_heads % size and size % kv_heads:
            raise ValueError(f"{given} must divide num_key_value_heads={kv_heads} or be a multiple of it")
        if (size - 1) * -(-vocab_size // size) >= vocab_size:
            raise ValueError(f"{given} leaves a rank without a part of the vocabulary of size {vocab_size}")
        last = self.device_of(size - 1)
        if size > 1 and last.type == "cuda" and last.index >= (count := torch.cuda.device_count()):
            raise ValueError(f"{given} needs devices {self.device_of(0)} to {last}, but there are {count}")

    def device_of(self, rank: int) -> torch.device:
        """The device of a rank: neighbours, beginning with the one that was asked for."""
        device = torch.device(self.device)
        return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        name = self.dtype
        if name == "auto":
            name = self.hf_config.dtype or self.hf_config.usual_dtype(self.device)
        if name not in DTYPES:
            raise ValueError(f"set dtype, since the checkpoint's {name!r} is none of {list(DTYPES)}")
        return getattr(torch, name)

    @property
    def kv_cache_torch_dtype(self) -> torch.dtype:
        name = self.kv_cache_dtype
        return self.torch_dtype if name == "auto" else getattr(torch, name)
