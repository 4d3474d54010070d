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
from nanovllm.kernels.decode_attention import paged_decode_attention, paged_decode_attention_torch
from nanovllm.kernels.kv_store import ROWS, CacheLayout, qk_norm_rope_store
from nanovllm.kernels.kv_store import store_kvcache as store_kvcache
from nanovllm.kernels.prefill_attention import varlen_prefill_attention, varlen_prefill_attention_torch
from nanovllm.kernels.runtime import HAVE_TRITON, TRITON_DEVICES, use_triton
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

    devices = TRITON_DEVICES  # types of those where kernels compute
    largest_plan: Hashable = False  # the key of the plan that takes most memory

    def __init__(self, layout: CacheLayout = ROWS):
        self.layout = layout

    def for_layer(self, layer: "Attention") -> "AttentionBackend":
        """The back-end that computes this layer."""
        return self

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        """k and v of the step's own tokens, or the caches where it has block tables. -> The shape of q."""
        has_kernel = q.device.type in self.devices
        attend = varlen_prefill_attention if has_kernel else varlen_prefill_attention_torch
        return attend(q, k, v, variant, step, self.layout)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        """k and v are the caches. -> The shape of q."""
        has_kernel = q.device.type in self.devices
        attend = paged_decode_attention if has_kernel else paged_decode_attention_torch
        return attend(q, k, v, variant, step, self.layout)

    def plan(self, sequences: list[Any], is_new: bool) -> tuple[Hashable, Any]:
        """
        Called on rank 0 for each decode step; `is_new` says whether other sequences decode than in the one
        before. Returns the plan's key, False if there is none, and the message for every rank, None if there
        is nothing to say. A CUDA graph is captured for each key.
        """
        return False, None

    def allocate(self, device: torch.device) -> None:
        """Make the tables of plans. Called on every rank, before the memory for the KV cache is counted."""

    def receive(self, message: Any) -> None:
        """Called on every rank, before the step."""

    def inputs(self, batch_size: int, key: Hashable) -> Any:
        """The plan for so many sequences: tensors that stay where they are, with no work at first."""

    def close(self) -> None:
        """Free the tables."""


class TorchBackend(AttentionBackend):
    devices = ()


class FlashBackend(AttentionBackend):
    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            step.cu_seqlens_q,
            step.cu_seqlens_k,
            step.max_seqlen_q,
            step.max_seqlen_k,
            block_table=step.block_tables,
            **variant.flash_options(),
        )

    def decode(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        return flash_attn_with_kvcache(
            q[:, None],
            k,
            v,
            cache_seqlens=step.context_lens,
            block_table=step.block_tables,
            **variant.flash_options(),
        ).squeeze(1)


BACKENDS = {"torch": TorchBackend, "flash": FlashBackend}


def get_backend(
    config: Config, device: torch.device, layers: "list[Attention]", layout: CacheLayout
) -> AttentionBackend:
    """The back-end that `attention_backend` names. Raises ValueError if it cannot work here."""
    name, on_cpu = config.attention_backend, device.type != "cuda"
    if name == "flash":
        cache = "it reads a KV cache of the model's dtype only, and kv_cache_dtype is "
        problems = {
            "the package flash-attn is not installed": not HAVE_FLASH,
            "it needs a CUDA device": on_cpu,
            "it computes bfloat16 and float16 only": config.torch_dtype == torch.float32,
            cache + repr(config.kv_cache_dtype): layout.dtype != config.torch_dtype,
            "it needs a kvcache_block_size that is a multiple of 256": config.kvcache_block_size % 256,
            "it computes heads of up to 256": any(layer.head_dim > 256 for layer in layers),
            **{layer.variant.flash_problem: layer.variant.flash_problem for layer in layers},
        }
    else:
        lacks_triton = name == "triton" and (on_cpu or not HAVE_TRITON)
        problems = {"it needs a CUDA device and the package triton": lacks_triton}
    for problem, applies in problems.items():
        if applies:
            raise ValueError(f"attention_backend={name!r} cannot be used: {problem}")
    return BACKENDS.get(name, AttentionBackend)(layout)


class Attention(nn.Module):
    """
    `k_cache` and `v_cache`, [blocks, block_size, kv_heads, head_dim] or as the layout has them, are views
    that the runner sets, with `backend`. `variant` says what the layer computes.
    """

    def __init__(self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.variant = AttentionVariant(scale)
        self.k_cache = self.v_cache = torch.empty(0)
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
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = qkv.view(len(qkv), -1, self.head_dim).split_with_sizes(heads, dim=1)
        if not use_triton(qkv):
            if q_norm is not None:
                q, k = q_norm(q), k_norm(k)
            return self.store(*rotary_emb(positions, q, k), v)
        step = get_context()
        qk_norm_rope_store(
            q,
            k,
            v,
            q_norm and q_norm.weight,
            k_norm and k_norm.weight,
            q_norm.eps if q_norm else 0.0,
            positions,
            rotary_emb.cos_sin_cache,
            self.k_cache,
            self.v_cache,
            step.slot_mapping,
            self.backend.layout.store_hooks(self.k_cache, self.head_dim, step.is_prefill),
        )
        return q, k, v

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store keys and values that are rotated already. -> q, k and v to attend with."""
        step, layout = get_context(), self.backend.layout
        q, k = layout.rotate(q, k)
        if self.k_cache.numel():  # empty in the warm-up
            layout.store(k, v, self.k_cache, self.v_cache, step.slot_mapping)
        if step.is_prefill:
            k, v = layout.as_stored(k).to(q.dtype), layout.as_stored(v).to(q.dtype)
        return q, k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """
        q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], which are stored already ->
        [tokens, heads * head_dim].
        """
        step = get_context()
        if step.block_tables is not None:  # else no key comes from the cache
            k, v = self.k_cache, self.v_cache
        attend = self.backend.prefill if step.is_prefill else self.backend.decode
        return attend(q, k, v, self.variant, step).reshape(len(q), -1)
