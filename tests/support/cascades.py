"""Cascade attention without an engine."""

from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.extensions.prefixes.cascade import CascadeBackend
from nanovllm.layers.attention import AttentionBackend


def cascade_config(heads: int = 4, kv_heads: int = 2, **options: Any) -> SimpleNamespace:
    """All that a CascadeBackend reads of an engine's options, and more `options`."""
    sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, tokens_in_reach=0, vocab_size=50)
    defaults = dict(attention_backend="auto", enable_prefix_caching=True, tensor_parallel_size=1)
    return SimpleNamespace(
        **defaults | dict(max_num_seqs=4, torch_dtype=torch.float32) | options,
        hf_config=SimpleNamespace(**sizes),
    )


def make_cascade(config: Any = None, behind: AttentionBackend | None = None) -> CascadeBackend:
    """On the CPU."""
    cpu = torch.device("cpu")
    backend = CascadeBackend(behind or AttentionBackend(), config or cascade_config(), cpu)
    backend.allocate(cpu)
    return backend
