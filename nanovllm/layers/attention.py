"""Attention over the paged KV cache, and the choice of who computes it.

A layer stores the step's keys and values first and attends second, so sequences of one step may read each
other's blocks. What a back-end must offer is two functions, one per phase; everything else is the same for
all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.config import Config
from nanovllm.kernels.attention_rule import AttentionRule
from nanovllm.kernels.decode_attention import paged_decode_attention, paged_decode_attention_torch
from nanovllm.kernels.int8_cache import as_stored, hadamard_rotate, is_int8
from nanovllm.kernels.kv_store import qk_norm_rope_store, store_kvcache
from nanovllm.kernels.prefill_attention import varlen_prefill_attention, varlen_prefill_attention_torch
from nanovllm.kernels.runtime import HAVE_TRITON, use_triton
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import get_context

try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    HAVE_FLASH = True
except ImportError:
    HAVE_FLASH = False


class AttentionBackend(NamedTuple):
    """The signatures of `varlen_prefill_attention` and `paged_decode_attention`."""

    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]


def flash_options(rule: AttentionRule) -> dict[str, Any]:
    window = (rule.window - 1, 0) if rule.window else (-1, -1)  # which does not count the token itself
    return dict(softmax_scale=rule.scale, causal=True, window_size=window, softcap=rule.softcap)


def flash_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, rule, block_tables):
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *lengths, block_table=block_tables, **flash_options(rule))


def flash_decode(q, k_cache, v_cache, block_tables, context_lens, rule, shared=None):
    assert shared is None, "it reads nothing in groups"
    options = dict(cache_seqlens=context_lens, block_table=block_tables, **flash_options(rule))
    return flash_attn_with_kvcache(q.unsqueeze(1), k_cache, v_cache, **options).squeeze(1)


KERNELS = AttentionBackend(varlen_prefill_attention, paged_decode_attention)  # on a CPU their torch twins
BACKENDS = {
    "auto": KERNELS,
    "triton": KERNELS,
    "torch": AttentionBackend(varlen_prefill_attention_torch, paged_decode_attention_torch),
    "flash": AttentionBackend(flash_prefill, flash_decode),
}


def get_backend(config: Config, device: torch.device, layers: "list[Attention]") -> AttentionBackend:
    """The back-end that `attention_backend` names. Raises ValueError if it cannot work here."""
    name, on_cpu = config.attention_backend, device.type != "cuda"
    cache = f"it reads a KV cache of the model's dtype only, and kv_cache_dtype is {config.kv_cache_dtype!r}"
    problems = {
        "flash": {
            "the package flash-attn is not installed": not HAVE_FLASH,
            "it needs a CUDA device": on_cpu,
            "it computes bfloat16 and float16 only": config.torch_dtype == torch.float32,
            cache: config.kv_cache_torch_dtype != config.torch_dtype,
            "it needs a kvcache_block_size that is a multiple of 256": config.kvcache_block_size % 256,
            "it knows no attention sinks": any(layer.rule.sinks is not None for layer in layers),
            "it computes heads of up to 256": any(layer.head_dim > 256 for layer in layers),
        },
        "triton": {"it needs a CUDA device and the package triton": on_cpu or not HAVE_TRITON},
    }
    for problem, applies in problems.get(name, {}).items():
        if applies:
            raise ValueError(f"attention_backend={name!r} cannot be used: {problem}")
    return BACKENDS[name]


class Attention(nn.Module):
    """
    `k_cache` and `v_cache`, [blocks, block_size, kv_heads, head_dim] or 8-bit, are views that the runner
    sets. What `window`, `softcap` and `sinks` [heads] do, `AttentionRule` says.
    """

    def __init__(
        self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int,
        *, window: int = 0, softcap: float = 0.0, sinks: nn.Parameter | None = None,
    ):  # fmt: skip
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rule = AttentionRule(scale, window, softcap, sinks)
        # Shared beginnings may lie before the window, of which a layer reads less by itself.
        self.reads_together = not window
        self.k_cache = self.v_cache = torch.empty(0)
        self.backend = KERNELS

    def rotate_and_store(
        self, positions: Tensor, qkv: Tensor,
        rotary_emb: RotaryEmbedding, q_norm: RMSNorm | None, k_norm: RMSNorm | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """
        Normalise and rotate the queries and keys in qkv [tokens, (heads + 2 kv_heads) * head_dim], which may
        be overwritten, and store keys and values. -> q, k and v, [tokens, heads of each, head_dim]. With an
        8-bit cache k and v of a prefill are rounded as those in the cache are, so that results do not depend
        on which tokens come from there.
        """
        step = get_context()
        slots = step.slot_mapping
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = qkv.view(len(qkv), -1, self.head_dim).split_with_sizes(heads, dim=1)
        if use_triton(qkv):
            weights = (q_norm.weight, k_norm.weight, q_norm.eps) if q_norm else (None, None, 0.0)
            sizes = self.num_heads, self.num_kv_heads, self.head_dim
            cos_sin, caches = rotary_emb.cos_sin_cache, (self.k_cache, self.v_cache)
            qk_norm_rope_store(qkv, *sizes, *weights, positions, cos_sin, *caches, slots, step.is_prefill)
            return q, k, v
        if q_norm is not None:
            q, k = q_norm(q), k_norm(k)
        return self.store(*rotary_emb(positions, q, k), v)

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store keys and values that are rotated already. -> q, k and v to attend with."""
        step = get_context()
        slots = step.slot_mapping
        if is_int8(self.k_cache):
            q, k = hadamard_rotate(q).to(q.dtype), hadamard_rotate(k)
        if self.k_cache.numel():  # empty in the warm-up
            store_kvcache(k, v, self.k_cache, self.v_cache, slots)
        if is_int8(self.k_cache) and step.is_prefill:
            k, v = as_stored(k).to(q.dtype), as_stored(v).to(q.dtype)
        return q, k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """
        q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], which are stored already ->
        [tokens, heads * head_dim].
        """
        step = get_context()
        if not step.is_prefill:
            caches = self.k_cache, self.v_cache
            lengths = step.context_lens
            shared = step.shared if self.reads_together else None
            out = self.backend.decode(q, *caches, step.block_tables, lengths, self.rule, shared)
        else:
            if step.block_tables is not None:
                k, v = self.k_cache, self.v_cache
            lengths = step.cu_seqlens_q, step.cu_seqlens_k, step.max_seqlen_q, step.max_seqlen_k
            out = self.backend.prefill(q, k, v, *lengths, self.rule, step.block_tables)
        return out.reshape(len(q), -1)
