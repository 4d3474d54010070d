"""One sequence at a time, keys repeated for the heads that share them, a mask for what comes later."""

import torch
from torch import Tensor

from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.layers import attention
from nanovllm.utils.context import Context


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.to(q.dtype).repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    sees = torch.arange(len(k)) <= torch.arange(len(k) - len(q), len(k))[:, None]
    weights = scores.float().masked_fill(~sees, float("-inf")).softmax(-1).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)


class AttentionBackend(attention.AttentionBackend):
    def pages(self, cache: Tensor, table: Tensor, length: int) -> Tensor:
        num_blocks = -(-length // cache.shape[1])
        return cache[table[:num_blocks]].flatten(0, 1)[:length]

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        out = torch.empty_like(q)
        q_starts, k_starts = step.cu_seqlens_q.tolist(), step.cu_seqlens_k.tolist()
        for i in range(len(q_starts) - 1):
            mine = slice(q_starts[i], q_starts[i + 1])
            if step.block_tables is None:
                keys, values = (x[k_starts[i] : k_starts[i + 1]] for x in (k, v))
            else:
                length = k_starts[i + 1] - k_starts[i]
                keys, values = (self.pages(x, step.block_tables[i], length) for x in (k, v))
            out[mine] = attend(q[mine], keys, values, variant.scale)
        return out

    def decode(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        rows = []
        for i, length in enumerate(step.context_lens.tolist()):
            keys, values = (self.pages(x, step.block_tables[i], length) for x in (k, v))
            rows.append(attend(q[i : i + 1], keys, values, variant.scale))
        return torch.cat(rows)
