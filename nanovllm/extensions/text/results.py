"""What users get back: the text of a completion, whole or while it grows, and the result of a prompt."""

import functools
import itertools
import math
import weakref
from typing import Any, NamedTuple

from nanovllm.engine.sequence import Request, Sequence
from nanovllm.extensions.text.detokenizer import Detokenizer, vocabulary_of

# Of completions that a stop text has ended.
_cut_texts: weakref.WeakKeyDictionary[Sequence, str] = weakref.WeakKeyDictionary()


class AttrDict(dict[str, Any]):
    """A dict whose keys are attributes as well. What was not asked for is None as an attribute and no key."""

    OPTIONAL = ("logprobs", "prompt_logprobs")

    def __getattr__(self, name: str) -> Any:
        if name in self or name in self.OPTIONAL:
            return self.get(name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}, only {', '.join(self)}")


class Completion(AttrDict):
    """One completion of a prompt."""

    index: int = 0  # among the prompt's completions
    cumulative_logprob: float | None = None  # of all its tokens, where logprobs were asked for


class Piece(AttrDict):
    """
    What is new of a completion since the last piece: text (which may be held back for later pieces),
    token_ids, and logprobs where asked for. The last piece has its finish_reason and stop_reason.
    """


class Result(AttrDict):
    """
    All completions of a prompt: the keys are those of the first one, and the attribute `outputs` has all. The
    prompt itself is in attributes only, so that a result that is printed or written as JSON stays short.
    """

    outputs: list[Completion]
    prompt: str | None = None  # its text, unless it was given as token ids
    prompt_token_ids: list[int]
    request_id: int | str
    finished = True


class Logprob(NamedTuple):
    """The natural logarithm of a token's probability at its place, and its rank there: 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None


def completion_text(tokenizer: Any, seq: Sequence) -> str:
    """The text of a finished completion; empty without a tokenizer."""
    params, token_ids = seq.sampling_params, seq.completion_token_ids
    if tokenizer is None or not params.detokenize:
        return ""
    if isinstance(seq.stop_reason, str):
        return _cut_texts[seq]
    if seq.finish_reason == "stop" and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    return tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)


def make_result(tokenizer: Any, completions: list[Sequence]) -> Result:
    """The result of a prompt (see `LLM.generate`) from its finished completions."""
    outputs = [_fill(Completion(), tokenizer, seq, completion_text(tokenizer, seq)) for seq in completions]
    for index, output in enumerate(outputs):
        output.index = index
    first = completions[0]
    num_cached = first.num_prompt_tokens_cached or 0  # None: never admitted
    result = Result(outputs[0], num_prompt_tokens=first.num_prompt_tokens, num_cached_tokens=num_cached)
    if (count := first.sampling_params.prompt_logprobs) is not None:
        described = _describe(tokenizer, first.prompt_token_ids[1:], first.request.own["scores"].found, count)
        result["prompt_logprobs"] = [None, *described]
    if len(outputs) > 1:
        result["outputs"] = outputs
    result.outputs, result.prompt_token_ids = outputs, first.prompt_token_ids
    result.prompt, result.request_id = first.request.own.get("text"), first.seq_id
    return result


def make_score(token_ids: list[int], request: Request) -> dict[str, Any]:
    """The result of `LLM.score` for a text, whose request has been computed if it scores any token."""
    found = request.own["scores"].found
    left_out = [None] * (len(token_ids) - len(found))
    logprobs = [logprob for logprob, *_ in found]
    return {
        "token_ids": token_ids,
        "token_logprobs": left_out + logprobs,
        "logprob": sum(logprobs),
        "token_ranks": left_out + [rank for _, rank, *_ in found],
    }


def _fill(output: AttrDict, tokenizer: Any, seq: Sequence, text: str, start: int = 0) -> AttrDict:
    """Put into `output` what a completion has from its token `start` on, whose text is given."""
    token_ids = seq.completion_token_ids[start:]
    output.update(
        text=text, token_ids=token_ids, finish_reason=seq.finish_reason, stop_reason=seq.stop_reason
    )
    if (count := seq.sampling_params.logprobs) is not None:
        found = seq.request.own["logprobs"].get(seq.seq_id, [])[start : seq.num_completion_tokens]
        output["logprobs"] = _describe(tokenizer, token_ids, found, count)
        output.cumulative_logprob = sum(logprob for logprob, *_ in found)
    return output


def _describe(tokenizer: Any, token_ids: list[int], found: list[Any], count: int) -> list[dict[int, Logprob]]:
    """For each place the Logprob of its token and of the `count` likeliest ones, likeliest first."""
    text_of = {}.get if tokenizer is None else vocabulary_of(tokenizer).__getitem__
    make = functools.partial(tuple.__new__, Logprob)  # what Logprob(...) does, in half the time
    described = []
    for token_id, (logprob, rank, top_ids, top_logprobs) in zip(token_ids, found, strict=False):
        entries = {}
        if count:  # tokens that could not be drawn are left out
            top_ids = top_ids[:count]
            drawable = itertools.takewhile(math.isfinite, top_logprobs)
            top = map(make, zip(drawable, itertools.count(1), map(text_of, top_ids), strict=False))
            entries = dict(zip(top_ids, top, strict=False))
        entries[token_id] = make((logprob, rank, text_of(token_id)))
        described.append(entries)
    return described


class GrowingText:
    """A completion that is being made, and its text if it has one."""

    def __init__(self, tokenizer: Any, seq: Sequence):
        params = seq.sampling_params
        self.tokenizer, self.seq, self.detokenizer = tokenizer, seq, None
        if tokenizer is not None and params.detokenize:
            self.detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self.num_shown = self.num_shown_tokens = 0  # characters, tokens

    def find_stop(self) -> str | None:
        """
        The stop text that the newest tokens complete, if there is one; the completion's text ends there. Of
        several the one that begins first counts, and of these the one that is listed first.
        """
        params = self.seq.sampling_params
        if self.detokenizer.num_tokens == 0:  # made after a failed step: earlier tokens were searched before
            self._read(-1)
        num_old = self.detokenizer.num_settled
        text = self._read()
        if self.detokenizer.num_tokens < params.min_tokens:
            return None
        starts = {stop: text.find(stop, max(0, num_old - len(stop) + 1)) for stop in params.stop}
        found = {stop: start for stop, start in starts.items() if start >= 0}
        stop = min(found, key=found.get, default=None)
        if found:
            end = found[stop] + len(stop) * params.include_stop_str_in_output
            _cut_texts[self.seq] = text[:end]
        return stop

    def take_delta(self) -> str:
        """The text that is new: whole characters, and nothing that may belong to a stop text."""
        if self.seq.is_finished:
            sure = completion_text(self.tokenizer, self.seq)
        elif self.detokenizer is None:
            return ""
        else:
            self._read()
            sure = self.detokenizer.settled_text(self.seq.sampling_params.stop)
        piece = sure[self.num_shown :]
        self.num_shown += len(piece)
        return piece

    def take_piece(self) -> Piece | None:
        """What is new, with tokens and what belongs to them, or None."""
        seq, start = self.seq, self.num_shown_tokens
        if start == len(seq.completion_token_ids) and not seq.is_finished:
            return None
        piece = _fill(Piece(), self.tokenizer, seq, self.take_delta(), start)
        self.num_shown_tokens += len(piece.token_ids)
        return piece

    def _read(self, end: int | None = None) -> str:
        new = self.seq.token_ids[self.seq.num_prompt_tokens + self.detokenizer.num_tokens : end]
        self.detokenizer.add(new)
        return self.detokenizer.text
