"""Attention over the paged KV cache, and the choice of who computes it.

A layer stores the step's keys and values first and attends second, so sequences of one step may read each
other's blocks. What a back-end must offer is two methods, `prefill` and `decode`; everything else is the
same for all.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.config import Config
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.cache_layout import ROWS, CacheLayout
from nanovllm.kernels.decode_attention import paged_decode_attention, paged_decode_attention_torch
from nanovllm.kernels.kv_store import qk_norm_rope_store
from nanovllm.kernels.kv_store import store_kvcache as store_kvcache
from nanovllm.kernels.prefill_attention import varlen_prefill_attention, varlen_prefill_attention_torch
from nanovllm.kernels.runtime import HAVE_TRITON, use_triton
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context, get_context

try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    HAVE_FLASH = True
except ImportError:
    HAVE_FLASH = False


class AttentionBackend:
    """
    Computes attention for layers whose caches have this layout: with paged Triton kernels, on a CPU with
    their references in torch. Others do it in another way.

    A back-end may plan decode steps, once for all layers. Rank 0's `plan` sees the sequences, and its message
    reaches `receive` on every rank before the step, whose `Context.attention_plan` has what `inputs` returns.
    This back-end plans nothing.
    """

    is_reference = False  # whether it computes in torch on a GPU, too
    largest_plan: Hashable = False  # the key of the plan that takes most memory; False: `plan` is not called
    num_decode_steps = 0  # on rank 0, so far: counted by the BatchMaker

    def __init__(self, layout: CacheLayout = ROWS):
        self.layout = layout

    def for_layer(self, layer: "Attention") -> "AttentionBackend":
        """The back-end that computes this layer."""
        return self

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        """k and v of the step's own tokens, or the caches where it has block tables. -> The shape of q."""
        return varlen_prefill_attention(q, k, v, *_lengths(step), variant, step.block_tables, self.layout)

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Context
    ) -> Tensor:
        """-> The shape of q."""
        tables = step.block_tables, step.context_lens
        return paged_decode_attention(q, k_cache, v_cache, *tables, variant, self.layout)

    def plan(self, sequences: list[Any]) -> tuple[Hashable, Any]:
        """
        Called on rank 0 when other sequences decode than in the step before. Returns the plan's key, False if
        there is none, and the message for every rank, None if there is nothing to say. A CUDA graph is
        captured for each key.
        """
        return False, None

    def allocate(self, device: torch.device) -> None:
        """Make the tables of plans. Called on every rank, before the memory for the KV cache is counted."""

    def receive(self, message: Any) -> None:
        """Called on every rank, before the step."""

    def inputs(self, batch_size: int, key: Hashable, is_empty: bool = False) -> Any:
        """The plan for so many sequences: tensors that stay where they are. An empty one has no work."""

    def stats(self) -> dict[str, int]:
        """Counts for `LLMEngine.stats`, on rank 0."""
        return {}

    def reset(self) -> None:
        """After a step that failed: forget all sequences."""

    def close(self) -> None:
        """Free the tables."""


class TorchBackend(AttentionBackend):
    is_reference = True

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        tables, layout = step.block_tables, self.layout
        return varlen_prefill_attention_torch(q, k, v, *_lengths(step), variant, tables, layout)

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Context
    ) -> Tensor:
        tables = step.block_tables, step.context_lens
        return paged_decode_attention_torch(q, k_cache, v_cache, *tables, variant, self.layout)


class FlashBackend(AttentionBackend):
    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        options = variant.flash_options()
        return flash_attn_varlen_func(q, k, v, *_lengths(step), block_table=step.block_tables, **options)

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Context
    ) -> Tensor:
        options = variant.flash_options()
        options |= {"cache_seqlens": step.context_lens, "block_table": step.block_tables}
        return flash_attn_with_kvcache(q.unsqueeze(1), k_cache, v_cache, **options).squeeze(1)


def _lengths(step: Context) -> tuple[Tensor, Tensor, int, int]:
    return step.cu_seqlens_q, step.cu_seqlens_k, step.max_seqlen_q, step.max_seqlen_k


BACKENDS = {
    "auto": AttentionBackend,
    "triton": AttentionBackend,
    "torch": TorchBackend,
    "flash": FlashBackend,
}


def get_backend(
    config: Config, device: torch.device, layers: "list[Attention]", layout: CacheLayout
) -> AttentionBackend:
    """The back-end that `attention_backend` names. Raises ValueError if it cannot work here."""
    name, on_cpu = config.attention_backend, device.type != "cuda"
    cache = f"it reads a KV cache of the model's dtype only, and kv_cache_dtype is {config.kv_cache_dtype!r}"
    problems = {
        "flash": {
            "the package flash-attn is not installed": not HAVE_FLASH,
            "it needs a CUDA device": on_cpu,
            "it computes bfloat16 and float16 only": config.torch_dtype == torch.float32,
            cache: layout.dtype != config.torch_dtype,
            "it needs a kvcache_block_size that is a multiple of 256": config.kvcache_block_size % 256,
            "it computes heads of up to 256": any(layer.head_dim > 256 for layer in layers),
            **{layer.variant.flash_problem: layer.variant.flash_problem for layer in layers},
        },
        "triton": {"it needs a CUDA device and the package triton": on_cpu or not HAVE_TRITON},
    }
    for problem, applies in problems.get(name, {}).items():
        if applies:
            raise ValueError(f"attention_backend={name!r} cannot be used: {problem}")
    return BACKENDS[name](layout)


class Attention(nn.Module):
    """
    `k_cache` and `v_cache`, [blocks, block_size, kv_heads, head_dim] or as the layout has them, are views
    that the runner sets, with `layout` and `backend`. `variant` says what the layer computes.
    """

    def __init__(self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.variant = AttentionVariant(scale)
        self.k_cache = self.v_cache = torch.empty(0)
        self.layout = ROWS
        self.backend = AttentionBackend()

    def rotate_and_store(
        self,
        positions: Tensor,
        qkv: Tensor,
        rotary_emb: RotaryEmbedding,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Normalise and rotate the queries and keys in qkv [tokens, (heads + 2 kv_heads) * head_dim], which may
        be overwritten, and store keys and values. -> q, k and v, [tokens, heads of each, head_dim].
        """
        step = get_context()
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = qkv.view(len(qkv), -1, self.head_dim).split_with_sizes(heads, dim=1)
        if use_triton(qkv):
            weights = (q_norm.weight, k_norm.weight, q_norm.eps) if q_norm else (None, None, 0.0)
            sizes = self.num_heads, self.num_kv_heads, self.head_dim
            cos_sin, caches = rotary_emb.cos_sin_cache, (self.k_cache, self.v_cache)
            hooks = self.layout.store_hooks(self.k_cache, self.head_dim, step.is_prefill)
            qk_norm_rope_store(qkv, *sizes, *weights, positions, cos_sin, *caches, step.slot_mapping, hooks)
            return q, k, v
        if q_norm is not None:
            q, k = q_norm(q), k_norm(k)
        return self.store(*rotary_emb(positions, q, k), v)

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store keys and values that are rotated already. -> q, k and v to attend with."""
        step = get_context()
        q, k = self.layout.rotate(q, k)
        if self.k_cache.numel():  # empty in the warm-up
            self.layout.store(k, v, self.k_cache, self.v_cache, step.slot_mapping)
        if step.is_prefill:
            k, v = self.layout.as_stored(k).to(q.dtype), self.layout.as_stored(v).to(q.dtype)
        return q, k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """
        q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], which are stored already ->
        [tokens, heads * head_dim].
        """
        step = get_context()
        if not step.is_prefill:
            out = self.backend.decode(q, self.k_cache, self.v_cache, self.variant, step)
        else:
            if step.block_tables is not None:
                k, v = self.k_cache, self.v_cache
            out = self.backend.prefill(q, k, v, self.variant, step)
        return out.reshape(len(q), -1)
