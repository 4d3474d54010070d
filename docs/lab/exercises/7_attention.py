"""Attention over pages, in plain torch.

softmax(scale * q k^T) v, where a token sees itself and what came before it, and several query heads share a
head of keys and values. Write the three methods; `my_attention.py`, one folder up, has a version to look at
when you are done.
"""

from torch import Tensor

from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.layers import attention
from nanovllm.utils.context import Context


class AttentionBackend(attention.AttentionBackend):
    def pages(self, cache: Tensor, table: Tensor, length: int) -> Tensor:
        """
        The first `length` tokens of a sequence. cache [blocks, block_size, kv_heads, head_dim] and table, the
        numbers of its blocks in order -> [length, kv_heads, head_dim].
        """
        raise NotImplementedError("exercise 7")

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        """
        q [tokens, heads, head_dim] of all sequences, one after the other: those of the i-th are from
        step.cu_seqlens_q[i] to step.cu_seqlens_q[i + 1], and they are the last of its tokens. Its keys are
        those from step.cu_seqlens_k[i] to step.cu_seqlens_k[i + 1] of k and v; or, if there is
        step.block_tables, as many in the pages of its row there, since k and v are the caches then.
        `variant.scale` is the scale. -> like q.
        """
        raise NotImplementedError("exercise 7")

    def decode(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        """q has one token of each sequence, the last of step.context_lens[i] tokens; k and v are the
        caches."""
        raise NotImplementedError("exercise 7")
