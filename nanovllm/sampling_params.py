"""What one request asks for: how its tokens are drawn, when it ends, and what its result contains. Knows
nothing of the engine.

The core serves a few of the fields. Those of others are checked by what serves them, see `checks`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanovllm.utils.validation import MAX_FLOAT, MAX_INT, Check, check_bool, integer, number

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
CHECKS = {
    "temperature": number(0, MAX_FLOAT, "finite and at least 0 (0 is greedy)"),
    "max_tokens": integer(1, MAX_INT, None),
    "ignore_eos": check_bool,
    "seed": integer(0, MAX_SEED, None),
}


@dataclass(slots=True, unsafe_hash=True)
class SamplingParams:
    """
    temperature:                divides the logits before sampling; 0 is greedy decoding.
    max_tokens:                 most tokens to generate, at least 1; None is as many as fit the context, whose
                                end is the end of every completion.
    ignore_eos:                 go on to `max_tokens` even when an end-of-sequence token is drawn.
    top_p:                      draw from the fewest likeliest tokens that together have this probability.
    top_k:                      draw from this many likeliest tokens; 0 and -1 are all of them.
    min_p:                      draw from tokens at least this probable, as a share of the likeliest one's.
    seed:                       draw the same tokens for the same prompt every time.
    n:                          how many completions of the prompt to draw, each with a seed of its own.
    stop:                       one or more texts that end the completion; its text then ends before them. If
                                one token completes several, the one that begins first counts, and of those
                                that begin together the first in the list.
    stop_token_ids:             token ids that end the completion; its text then ends before them.
    include_stop_str_in_output: keep in the text what ended it, whether a text or a token.
    min_tokens:                 before so many tokens nothing but `max_tokens` ends the completion.
    logprobs:                   return log-probabilities of each drawn token and of so many likeliest ones;
                                with 0 of the drawn token alone.
    prompt_logprobs:            the same for the prompt's tokens.
    presence_penalty:           subtracted from the logits of tokens that are in the completion.
    frequency_penalty:          subtracted from a token's logit once for each time it is in the completion.
    repetition_penalty:         divides the positive logits of tokens that are in prompt or completion, and
                                multiplies the negative ones (Keskar et al. 2019, arXiv:1909.05858).
    logit_bias:                 {token id: number to add to its logit}, from -100 to 100.
    allowed_token_ids:          the only tokens that may be drawn; None is all.
    bad_words:                  texts that may not be in the completion as the tokens that the tokenizer makes
                                of them at the beginning of a text or after a space. The same text in other
                                tokens (" Par" + "is") is not noticed.
    skip_special_tokens:        leave special tokens out of the text.
    detokenize:                 decode the tokens; if False, the text is empty and `stop` cannot be used.
    structured_outputs:         draw only tokens with which the completion can come to look as this says.
    extra:                      anything, for extensions of your own: each hook gets it with the sequence.

    Logits are changed in this order: biases and bans, penalties, the tokens that structured_outputs rules
    out, temperature, min_p, top_k, top_p (with the probabilities among the tokens that min_p and top_k left).
    Tokens with equal logits are kept or left out together. Log-probabilities are the model's, before any of
    these changes, unless the engine's logprobs_mode is "processed".

    Fields may be assigned to: the next call checks them again, and requests made before keep what they had.

    Raises ValueError with the bad value. Collections may be given as lists or sets, and `logit_bias` as a
    dict; they are kept as tuples.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: Any = None
    extra: Any = field(default=None, hash=False)
    checks: ClassVar[list[Callable[["SamplingParams"], None]]] = []  # of fields that the core does not serve

    def __post_init__(self) -> None:
        self.check(CHECKS)
        for check_others in self.checks:
            check_others(self)

    def check(self, checks: Mapping[str, Check]) -> None:
        """Keep what the checks make of these fields."""
        for name, check in checks.items():
            setattr(self, name, check(getattr(self, name), name))
