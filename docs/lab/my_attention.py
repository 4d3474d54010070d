"""Can I write attention myself, and know that it is right?

An AttentionBackend has two methods. Here they are in plain torch, one sequence and one head group at a time,
in
*compare* mode: the engine's own result is used, and the largest difference to ours is kept.
"""

import torch
from harness import callers_of
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.layers.attention import AttentionBackend
from nanovllm.utils.context import Context


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [new tokens, heads, dim], the last of the tokens in k and v [tokens, kv_heads, dim] -> like q."""
    repeats = q.shape[1] // k.shape[1]  # several query heads read one head of keys
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    position = torch.arange(len(k) - len(q), len(k))
    is_later = torch.arange(len(k)) > position[:, None]
    weights = scores.masked_fill(is_later, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class MyAttention(AttentionBackend):
    def __init__(self) -> None:
        super().__init__()
        self.largest_difference = 0.0
        self.num_calls = 0

    def pages(self, cache: Tensor, table: Tensor, length: int) -> Tensor:
        """The first tokens that a block table leads to, [length, kv_heads, dim]."""
        return cache[table[: -(-length // cache.shape[1])]].flatten(0, 1)[:length]

    def compare(self, theirs: Tensor, ours: list[Tensor]) -> Tensor:
        self.num_calls += 1
        self.largest_difference = max(self.largest_difference, (theirs - torch.cat(ours)).abs().max().item())
        return theirs

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        ours = []
        q_starts, k_starts = step.cu_seqlens_q.tolist(), step.cu_seqlens_k.tolist()
        for i in range(len(q_starts) - 1):
            own = slice(k_starts[i], k_starts[i + 1])
            keys, values = k[own], v[own]
            if step.block_tables is not None:  # k and v are the cache
                keys, values = (self.pages(x, step.block_tables[i], own.stop - own.start) for x in (k, v))
            ours.append(attend(q[q_starts[i] : q_starts[i + 1]], keys, values, variant.scale))
        return self.compare(super().prefill(q, k, v, variant, step), ours)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        ours = []
        for i, length in enumerate(step.context_lens.tolist()):
            keys, values = (self.pages(x, step.block_tables[i], length) for x in (k, v))
            ours.append(attend(q[i : i + 1], keys, values, variant.scale))
        return self.compare(super().decode(q, k, v, variant, step), ours)


def main() -> None:
    prompts = ["The sky is", "Once upon a time there was", "Two and two make"]
    params = SamplingParams(temperature=0, max_tokens=20)
    options = {"num_kvcache_blocks": 16, "dtype": "float32", "max_num_batched_tokens": 8}
    mine = MyAttention()
    with LLM("smollm2", **options) as llm:
        plain = [result["token_ids"] for result in llm.generate(prompts, params, use_tqdm=False)]
    with LLM("smollm2", **options, extensions=[mine]) as llm, callers_of(MyAttention):
        compared = [result["token_ids"] for result in llm.generate(prompts, params, use_tqdm=False)]
    print(f"\n{mine.num_calls} calls; largest difference {mine.largest_difference:.1e}")
    print(
        "plain | mine\n"
        + "\n".join(f"{len(a)} tokens | {len(b)} tokens" for a, b in zip(plain, compared, strict=True))
    )
    assert compared == plain and mine.largest_difference < 1e-4


if __name__ == "__main__":
    main()
