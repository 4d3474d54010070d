"""How few bits do keys and values need?

A CacheLayout says how they lie in the cache. This one rounds each head of each token to so many bits with one
scale, keys apart from values, and keeps the rounded numbers as they are: what it costs in quality is real,
the memory that it would save is computed. A prefill attends to what the cache holds, so the perplexity of a
text shows the damage.
"""

import math

import torch
from harness import callers_of

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.kv_store import CacheLayout, store_kvcache

TEXT = """The planets of the solar system move around the sun in the same direction and almost in the same
plane. The four inner planets are small and made of rock; the four outer ones are much larger, and made of gas
and ice. Between Mars and Jupiter lies a belt of many thousands of small bodies, the largest of which is less
than a thousand kilometres wide. Comets come from farther away, and shine when the heat of the sun drives gas
and dust out of them."""


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x [..., head_dim], to integers of so many bits times a scale for each head of each token."""
    highest = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / highest
    return (x / scale).round() * scale


class FewBits(CacheLayout):
    def __init__(self, key_bits: int, value_bits: int):
        super().__init__(torch.float32)
        self.key_bits, self.value_bits = key_bits, value_bits

    def rotate(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, rounded(k, self.key_bits)  # keys pass here on their way to the cache, rotated already

    def store(self, k, v, k_cache, v_cache, slot_mapping) -> None:
        store_kvcache(k, rounded(v, self.value_bits), k_cache, v_cache, slot_mapping)

    def bytes_a_token(self, head_dim: int) -> float:
        return (self.key_bits + self.value_bits) * head_dim / 8 + 2 * 2  # and two scales of 16 bits


def perplexity(*extensions: CacheLayout) -> float:
    options = {"num_kvcache_blocks": 8, "max_num_batched_tokens": 32, "dtype": "float32"}
    with LLM("smollm2", **options, extensions=extensions) as llm, callers_of(*map(type, extensions)):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [result] = llm.generate([TEXT], params, use_tqdm=False)
    known = zip(result["prompt_logprobs"][1:], result.prompt_token_ids[1:], strict=True)
    return math.exp(
        -sum(each[token_id].logprob for each, token_id in known) / (len(result.prompt_token_ids) - 1)
    )


def main() -> None:
    plain = perplexity()
    print(f"\nkeys values | perplexity | bytes a token and head (of 64)\n  16     16 | {plain:10.3f} | 256")
    found = {}
    for key_bits, value_bits in [(8, 8), (8, 4), (4, 8), (4, 4), (3, 3)]:
        layout = FewBits(key_bits, value_bits)
        found[key_bits, value_bits] = perplexity(layout)
        row = f"{key_bits:4} {value_bits:6} | {found[key_bits, value_bits]:10.3f}"
        print(f"{row} | {layout.bytes_a_token(64):.0f}")
    assert abs(found[8, 8] / plain - 1) < 0.03
    assert found[8, 4] < found[4, 8] < found[3, 3], "keys need more bits than values"


if __name__ == "__main__":
    main()
