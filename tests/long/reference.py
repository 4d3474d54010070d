"""What the tokens of a completion decide by themselves: where it ends, why, its text and its sums.

Written from the description of `SamplingParams`, with the tokenizer and a model of transformers alone, for
whoever would else compare the engine with nothing but itself.
"""

from functools import partial
from math import exp
from typing import Any, NamedTuple

import pytest
import torch

from nanovllm import SamplingParams

HALF_A_CHARACTER = "\ufffd"
CLOSE = 1e-3  # of log-probabilities; transformers adds in another order


class End(NamedTuple):
    num_tokens: int
    finish_reason: str
    stop_reason: str | int | None
    text: str


def find_end(tokenizer: Any, params: SamplingParams, token_ids: list[int], most: int) -> End | None:
    """The first token with which a completion of at most `most` tokens ends; None if these do not end it."""
    decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
    decode = decode if params.detokenize else lambda _: ""
    ends = {*params.stop_token_ids, *([] if params.ignore_eos else [tokenizer.eos_token_id])}
    keeps, before = params.include_stop_str_in_output, ""
    for count, token_id in enumerate(token_ids, 1):
        text = decode(token_ids[:count]).rstrip(HALF_A_CHARACTER)
        found = [
            (start, place, stop)
            for place, stop in enumerate(params.stop)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        before = text
        if found and count >= params.min_tokens:
            start, _, stop = min(found)
            return End(count, "stop", stop, text[: start + keeps * len(stop)])
        if token_id in ends:
            # Bans yield to a grammar that leaves nothing else to draw.
            assert count > params.min_tokens or params.structured_outputs, "it ends before min_tokens"
            reason = token_id if token_id in params.stop_token_ids else None
            return End(count, "stop", reason, decode(token_ids[: count - (not keeps)]))
        if count == most:
            return End(count, "length", None, decode(token_ids[:count]))
    return None


def check_result(
    tokenizer: Any, prompt: list[int], params: SamplingParams, result: Any, context: int, model: Any = None
) -> None:
    """
    Raise AssertionError unless a result says what its tokens mean, in a context of so many tokens; and, with
    a model of transformers, unless their log-probabilities are that model's.
    """
    most = min(params.max_tokens, context - len(prompt))
    assert result["num_prompt_tokens"] == len(prompt)
    assert [output.index for output in result.outputs] == [*range(params.n)]
    known, was_broken_off = [], False
    if params.prompt_logprobs is not None:
        known = check_places(result["prompt_logprobs"][1:], prompt[1:], params.prompt_logprobs)
    for output in result.outputs:
        token_ids, reason = output["token_ids"], output["finish_reason"]
        end = find_end(tokenizer, params, token_ids, most)
        if reason in ("abort", "error"):
            was_broken_off = True
            assert end is None and output["stop_reason"] is None
        else:
            assert end == (len(token_ids), reason, output["stop_reason"], output["text"])
        assert params.allowed_token_ids is None or {*token_ids} <= {*params.allowed_token_ids}
        drawn = []
        if params.logprobs is not None:
            drawn = check_places(output["logprobs"], token_ids, params.logprobs)
            assert len(drawn) == len(token_ids)
            assert output.cumulative_logprob == pytest.approx(sum(drawn))
        if model is not None and (known or drawn):
            expected = logprobs_of(model, prompt + token_ids)
            assert known == pytest.approx(expected[: len(known)], abs=CLOSE)
            assert drawn == pytest.approx(expected[len(prompt) - 1 :][: len(drawn)], abs=CLOSE)
    assert was_broken_off or params.prompt_logprobs is None or len(known) == len(prompt) - 1


def check_places(places: list[dict], token_ids: list[int], count: int) -> list[float]:
    """
    Each has the `count` likeliest tokens and its own, and the last may be missing. Returns the tokens'
    log-probabilities.
    """
    drawn = [entries[token_id] for entries, token_id in zip(places, token_ids, strict=False)]
    for entries, own in zip(places, drawn, strict=True):
        ranks = sorted(entry.rank for entry in entries.values())
        assert ranks[:count] == [*range(1, count + 1)] and len(ranks) == count + (own.rank > count)
        assert sum(exp(entry.logprob) for entry in entries.values()) < 1 + CLOSE
    return [own.logprob for own in drawn]


@torch.no_grad()
def logprobs_of(model: Any, token_ids: list[int]) -> list[float]:
    """Of all tokens but the first."""
    logprobs = model(input_ids=torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
