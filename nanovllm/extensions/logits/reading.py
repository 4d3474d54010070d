"""Reads what a request asks for that changes logits or is told of them: bad words become token ids, and what
the model cannot do is refused.
"""

import functools
import itertools
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.limits import Limits
from nanovllm.engine.sequence import Request
from nanovllm.extensions.logits.edits import HISTORY, RULE_WORDS, num_rule_words
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import shown

FIELDS = frozenset(
    """
    top_p top_k min_p min_tokens logprobs prompt_logprobs presence_penalty frequency_penalty
    repetition_penalty logit_bias allowed_token_ids bad_words
    """.split()
)


class LogitsReader:
    is_slow = False

    def __init__(self, config: Config, tokenizer: Any, limits: Limits):
        self.model, self.vocab_size = config.model, config.hf_config.vocab_size
        self.tokenizer, self.limits = tokenizer, limits
        self._bad_word = functools.lru_cache(1024)(self._read_bad_word)

    def wants(self, params: SamplingParams) -> bool:
        return True

    def check(self, request: Request) -> None:
        """Puts bad words as token ids, `num_rule_words` and the tokens to be scored into `request.own`."""
        params = request.params
        if params.bad_words and self.tokenizer is None:
            remedy = "has no tokenizer; use stop_token_ids or logit_bias"
            raise ValueError(f"they have bad_words={shown(params.bad_words)}, but {self.model!r} {remedy}")
        named = {"allowed_token_ids": params.allowed_token_ids or ()}
        named["logit_bias"] = [token_id for token_id, _ in params.logit_bias]
        for kind, token_ids in named.items():
            if (highest := max(token_ids, default=0)) >= self.vocab_size:
                rule = f"token ids in {kind} must be from 0 to {self.vocab_size - 1}"
                raise ValueError(f"{rule}, got {shown(highest)}")
        bad_words, ends = self.bad_words(params), self.limits.end_token_ids(params)
        if (size := num_rule_words(params, bad_words, ends)) > RULE_WORDS:
            raise ValueError(
                f"bad_words of {sum(map(len, bad_words)):,} tokens and logit_bias of "
                f"{len(params.logit_bias):,} take {4 * size:,} bytes of the device's memory, "
                f"of which all requests together may have {4 * RULE_WORDS:,}"
            )
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed and ends.issuperset(allowed):
            rule = f"each of allowed_token_ids={shown(allowed)} ends a completion"
            raise ValueError(f"min_tokens={params.min_tokens} is not reached: {rule}")
        request.own.update(bad_words=bad_words, num_rule_words=size)
        if params.prompt_logprobs is not None:
            request.own["scored_token_ids"] = request.token_ids[1:]

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The bad words as token ids."""
        return list(itertools.chain.from_iterable(map(self._bad_word, params.bad_words)))

    def _read_bad_word(self, text: str) -> list[list[int]]:
        """
        Its token ids at the beginning of a text and after a space, for which most tokenizers have different
        tokens. Leaves out what contains tokens that the model never draws.
        """
        starts = (start + text.lstrip(" ") for start in ("", " "))
        encode = functools.partial(self.tokenizer.encode, add_special_tokens=False)
        token_ids = [ids for start in starts if (ids := encode(start))]
        if not token_ids:
            raise ValueError(f"bad_words has {shown(text)}, of which the tokenizer makes no token")
        if (longest := max(map(len, token_ids))) > HISTORY:
            rule = f"each of bad_words must have at most {HISTORY} tokens"
            raise ValueError(f"{rule}, got {longest} of {shown(text)}")
        distinct = [ids for i, ids in enumerate(token_ids) if ids not in token_ids[:i]]
        return [ids for ids in distinct if max(ids) < self.vocab_size]
