"""The attention back-end that reads a prefix of several sequences once, in front of any other back-end.

It computes the prefixes of a decode step for all sequences that begin with them, and leaves to the back-end
behind it what each sequence has of its own.
"""

import torch
from torch import Tensor

from nanovllm.extensions.prefixes.kernels.shared_prefix import (
    SharedPrefixes,
    WithPrefix,
    can_share,
    shared_prefix_attention,
    shared_prefix_attention_torch,
)
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.utils.context import Context


class CascadeBackend(AttentionBackend):
    """
    The tables of a step are made for layers with so many query heads for one kv head. `element_size` is that
    of queries, in bytes.
    """

    def __init__(
        self, behind: AttentionBackend, heads_per_kv_head: int, element_size: int, device: torch.device
    ):
        super().__init__(behind.layout)
        self.behind = behind
        self.heads_per_kv_head, self.element_size, self.device = heads_per_kv_head, element_size, device

    def for_layer(self, layer: Attention) -> AttentionBackend:
        """Prefixes may lie before a layer's first token, of which it reads less by itself."""
        sizes = layer.num_heads // layer.num_kv_heads, layer.head_dim, self.element_size
        is_fit = can_share(self.heads_per_kv_head, *sizes, self.device)
        return self if is_fit and layer.variant.sees_all else self.behind.for_layer(layer)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        return self.behind.prefill(q, k, v, variant, step)

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Context
    ) -> Tensor:
        if step.attention_plan is not None:
            attend = shared_prefix_attention
            if self.behind.is_reference:
                attend = shared_prefix_attention_torch
            shared: SharedPrefixes = step.attention_plan
            caches = k_cache, v_cache, step.block_tables
            variant = WithPrefix(variant, shared, *attend(q, *caches, variant, shared, self.layout))
        return self.behind.decode(q, k_cache, v_cache, variant, step)
