"""How do I keep a model from saying certain words?

Five minutes: a LogitsProcessor sees the logits of every sequence before a token is drawn, and may change
them. A logit of minus infinity is never drawn, at any temperature.
"""

from typing import Any

import torch
from harness import callers_of

from nanovllm import LLM, SamplingParams
from nanovllm.engine.interfaces import LogitsProcessor

PROMPT = "The three primary colours are"
WORDS = [" human", " eye"]


class BanWords(LogitsProcessor):
    name = "ban_words"

    def __init__(self, words: list[str]):
        self.words = words

    def start(self, config: Any, prompts: Any) -> None:
        """The tokenizer is there now. A word of several tokens is banned by its first one."""
        self.token_ids = [prompts.tokenizer.encode(word, add_special_tokens=False)[0] for word in self.words]

    def wants(self, params: SamplingParams) -> bool:
        return True  # of every request; a processor that no request wants costs nothing

    def apply(self, logits: torch.Tensor, step: Any) -> torch.Tensor:
        logits[:, self.token_ids] = float("-inf")  # [sequences, vocabulary]
        return logits


def complete(*extensions: Any) -> dict[str, Any]:
    with (
        LLM("smollm2", num_kvcache_blocks=8, extensions=extensions) as llm,
        callers_of(*map(type, extensions)),
    ):
        return llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]


def main() -> None:
    plain, mine = complete(), complete(BanWords(WORDS))
    print(f"\n{'plain':>7} | {plain['text']!r}\n{'mine':>7} | {mine['text']!r}")
    assert all(word in plain["text"] and word not in mine["text"] for word in WORDS)
    nothing = complete(BanWords([]))
    assert nothing["token_ids"] == plain["token_ids"], "banning nothing changes nothing"


if __name__ == "__main__":
    main()
