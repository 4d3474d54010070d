"""Reads what users give as prompts: turns it into requests, or raises an error that names what cannot be
served, before anything has changed.
"""

import functools
import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from nanovllm.checkpoints.tokenizer import tokenizer_errors
from nanovllm.config import Config
from nanovllm.engine.limits import Limits
from nanovllm.engine.sequence import Sequence, pack
from nanovllm.extensions.logits.edits import HISTORY, RULE_WORDS, num_rule_words
from nanovllm.extensions.structured.grammar import Grammars
from nanovllm.extensions.text.chat import render
from nanovllm.inputs import TextPrompt, TokensPrompt
from nanovllm.sampling_params import SamplingParams, recommended_params
from nanovllm.text.results import Result
from nanovllm.utils.validation import as_list, check, check_bool, find_surrogate, is_number, shown

Prompt = str | Iterable[int] | TextPrompt | TokensPrompt


@dataclass(eq=False, slots=True)
class Request:
    """A prompt that has been read, and its parameters; once it is queued, also its `completions`."""

    token_ids: list[int] = field(default_factory=list)
    params: SamplingParams = SamplingParams()
    bad_words: list[list[int]] = field(default_factory=list)  # as token ids
    num_rule_words: int = 0  # int32 that its rules take on a device
    scored_token_ids: list[int] = field(default_factory=list)  # the i-th is scored as what follows token i
    first_scored: int = 0  # those before it are not
    index: int = 0  # among the prompts of its call
    packed: bytes | None = None  # token_ids once more, see `Sequence.packed_prompt`
    grammar: Any = None  # compiled structured outputs
    error: Exception | None = None  # why it could not be read
    completions: list[Sequence] = field(default_factory=list)
    text: str | None = None  # of the prompt, unless it was given as token ids alone
    request_id: str | None = None  # the caller's own

    def label(self, result: Any) -> Any:
        """Put what the completions do not know into their result, and return it."""
        if isinstance(result, Result):
            result.prompt = self.text
            result.request_id = result.request_id if self.request_id is None else self.request_id
        return result

    @property
    def has_scores(self) -> bool:
        """Whether it scores any token: no text of a single one does."""
        return self.first_scored < len(self.scored_token_ids)


def as_token_ids(values: list | tuple, vocab_size: int, name: str) -> list[int]:
    """Token ids as a list of Python's integers. Raises ValueError for anything else."""
    token_ids = list(values)
    if set(map(type, token_ids)) - {int}:  # numpy's integers, or what is no token id at all
        for token_id in token_ids:
            check(is_number(token_id, int), f"{name}: token ids must be integers", token_id)
        token_ids = [int(token_id) for token_id in token_ids]
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    wrong = lowest if lowest < 0 else highest
    check(0 <= lowest <= highest < vocab_size, f"{name}: token ids must be from 0 to {vocab_size - 1}", wrong)
    return token_ids


def _name(index: int | None) -> str:
    """What messages call a prompt, alone or the index-th of several."""
    return "prompt" if index is None else f"prompts[{index}]"


def _check_is_one(prompt: Any, name: str) -> None:
    """Raise ValueError for several prompts in the place of one, and for a conversation."""
    first = prompt
    for _ in range(2):  # of a list of conversations or of token ids, too
        first = first[0] if isinstance(first, (list, tuple)) and first else first
    if isinstance(first, dict) and "role" in first:
        raise ValueError(f"{name} has messages of a conversation, which `chat` takes: {shown(prompt)}")
    if isinstance(first, str) and first is not prompt:
        raise ValueError(f"{name} must be one prompt; `generate` takes a list of texts: {shown(prompt)}")


class Prompts:
    def __init__(
        self, config: Config, tokenizer: Any, limits: Limits,
        grammars: Grammars, generation_config: dict[str, Any],
    ):  # fmt: skip
        self.model = config.model
        self.vocab_size = config.hf_config.vocab_size
        self.tokenizer = tokenizer
        self.limits, self.grammars = limits, grammars
        self.generation_config = generation_config
        self._bad_word = functools.lru_cache(1024)(self._read_bad_word)

    def recommended(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends. Raises ValueError for a bad value."""
        try:
            return recommended_params(self.generation_config)
        except ValueError as error:
            raise ValueError(f"generation_config.json of {self.model!r}: {error}") from None

    def read_all(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """One prompt or a list of them, with parameters for all or for each. Calls `warn_of_context`."""
        prompts = self._as_list(prompts)
        if sampling_params is None:
            sampling_params = self.recommended()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        rule = "sampling_params must be SamplingParams, a list of them, or None"
        rule += " (what the checkpoint recommends)"
        check(isinstance(sampling_params, (list, tuple)), rule, sampling_params)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(sampling_params)} sampling_params")
        checked: dict[int, SamplingParams] = {}  # by id: often all prompts have the same object
        for i, params in enumerate(sampling_params):
            if id(params) not in checked:
                checked[id(params)] = self._check_params(params, _name(i))
        each = (checked[id(params)] for params in sampling_params)
        requests = list(map(self._read_checked, prompts, each, itertools.count()))
        for i, request in enumerate(requests):
            request.grammar = self.compile_grammar(request.params, i)
        self.warn_of_context(requests)
        return requests

    def warn_of_context(self, requests: list[Request], which: str | None = None) -> bool:
        """Warn once if the context may end some of these requests before they have max_tokens."""
        most = self.limits.max_num_tokens
        asked = [(len(request.token_ids), request.params.max_tokens or 0) for request in requests]
        beyond = [max_tokens for length, max_tokens in asked if length + max_tokens > most]
        if beyond:
            found = sorted(set(beyond))
            values = ", ".join(map(str, found[:3])) + ", ..." * (len(found) > 3)
            which = which or f"{len(beyond)} of {len(requests)} prompts"
            message = f"max_tokens={values} reaches beyond the context of {most} tokens for {which}: "
            message += "such a completion ends there, with finish_reason 'length'"
            warnings.warn(message, stacklevel=2)
        return bool(beyond)

    @staticmethod
    def _as_list(prompts: Any) -> list[Any]:
        if isinstance(prompts, (str, dict)):
            return [prompts]
        found = as_list(prompts)
        rule = "prompts must be a string, a list of token ids, or a list (or another iterable) of these"
        check(found is not None, rule, prompts)
        return [found] if found and all(isinstance(p, Integral) for p in found) else found

    def read_scored(self, texts: Any, from_token: Any) -> list[tuple[list[int], Request]]:
        """The token ids of a text or a list of texts, and the request that scores them, see `LLM.score`."""
        texts = self._as_list(texts)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        first_tokens = from_token if isinstance(from_token, (list, tuple)) else [from_token] * len(texts)
        if len(first_tokens) != len(texts):
            raise ValueError(f"there are {len(texts)} prompts but {len(first_tokens)} from_token")
        found = []
        for i, (text, first) in enumerate(zip(texts, first_tokens, strict=True)):
            ids, _ = self._read_prompt(text, 0, f"prompts[{i}]")
            rule = f"from_token must be an integer from 0 to {len(ids)}, the tokens of prompts[{i}]"
            check(is_number(first, int, 0, len(ids)), rule, first)
            scoring = dict(scored_token_ids=ids[1:], first_scored=max(int(first) - 1, 0))
            found.append((ids, Request(ids[:-1], params, **scoring)))
        return found

    def read(self, prompt: Any, sampling_params: Any, index: int | None = None) -> Request:
        """One prompt, or the index-th of several, with parameters of its own."""
        request = self.read_but_grammar(prompt, sampling_params, index)
        request.grammar = self.compile_grammar(request.params, index)
        return request

    def read_but_grammar(self, prompt: Any, sampling_params: Any, index: int | None = None) -> Request:
        """The same without its grammar, which may take seconds to compile."""
        if sampling_params is None and index is None:
            sampling_params = self.recommended()
        params = self._check_params(sampling_params, _name(index))
        return self._read_checked(prompt, params, index)

    def _read_checked(self, prompt: Any, params: SamplingParams, index: int | None) -> Request:
        name = _name(index)
        token_ids, text = self._read_prompt(prompt, 1, name)
        bad_words, num_rule_words = self._read_rules(params, name)
        scored_token_ids = [] if params.prompt_logprobs is None else token_ids[1:]
        # While they are in the processor's cache: later it takes three times as long.
        packed = pack(token_ids)
        rest = num_rule_words, scored_token_ids, 0, index or 0, packed
        return Request(token_ids, params, bad_words, *rest, text=text)

    def compile_grammar(self, params: SamplingParams, index: int | None = None) -> Any:
        """The grammar of a request, if it wants one. Any thread may call this."""
        if params.structured_outputs is None:
            return None
        try:
            return self.grammars.compile(params.structured_outputs)
        except ValueError as error:
            raise ValueError(f"sampling_params for {_name(index)}: {error}") from error

    @staticmethod
    def _check_params(params: Any, name: str) -> SamplingParams:
        """A checked copy: fields may have been assigned to, and may be again while the request runs."""
        rule = f"sampling_params for {name} must be SamplingParams"
        check(isinstance(params, SamplingParams), rule, params)
        return replace(params)

    def _read_rules(self, params: SamplingParams, name: str) -> tuple[list[list[int]], int]:
        """Bad words as token ids, and `num_rule_words`. Raises ValueError for what the model cannot do."""
        where = f"sampling_params for {name}"
        for kind in ("stop", "bad_words"):
            if (texts := getattr(params, kind)) and self.tokenizer is None:
                remedy = f"but {self.model!r} has no tokenizer; use stop_token_ids or logit_bias"
                raise ValueError(f"{where} have {kind}={shown(texts)}, {remedy}")
        named = {"allowed_token_ids": params.allowed_token_ids or (), "stop_token_ids": params.stop_token_ids}
        named["logit_bias"] = [token_id for token_id, _ in params.logit_bias]
        for kind, token_ids in named.items():
            if (highest := max(token_ids, default=0)) >= self.vocab_size:
                rule = f"{where}: token ids in {kind} must be from 0 to {self.vocab_size - 1}"
                raise ValueError(f"{rule}, got {shown(highest)}")
        bad_words, ends = self.bad_words(params), self.limits.end_token_ids(params)
        if (size := num_rule_words(params, bad_words, ends)) > RULE_WORDS:
            raise ValueError(
                f"{where}: bad_words of {sum(map(len, bad_words)):,} tokens and logit_bias of "
                f"{len(params.logit_bias):,} take {4 * size:,} bytes of the device's memory, "
                f"of which all requests together may have {4 * RULE_WORDS:,}"
            )
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed and ends.issuperset(allowed):
            rule = f"each of allowed_token_ids={shown(allowed)} ends a completion"
            raise ValueError(f"{where}: min_tokens={params.min_tokens} is not reached: {rule}")
        return bad_words, size

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The bad words as token ids."""
        return list(itertools.chain.from_iterable(map(self._bad_word, params.bad_words)))

    def _read_bad_word(self, text: str) -> list[list[int]]:
        """
        Its token ids at the beginning of a text and after a space, for which most tokenizers have different
        tokens. Leaves out what contains tokens that the model never draws.
        """
        starts = (start + text.lstrip(" ") for start in ("", " "))
        token_ids = [ids for start in starts if (ids := self.tokenize(start, "bad_words", False))]
        if not token_ids:
            raise ValueError(f"bad_words has {shown(text)}, of which the tokenizer makes no token")
        if (longest := max(map(len, token_ids))) > HISTORY:
            rule = f"each of bad_words must have at most {HISTORY} tokens"
            raise ValueError(f"{rule}, got {longest} of {shown(text)}")
        distinct = [ids for i, ids in enumerate(token_ids) if ids not in token_ids[:i]]
        return [ids for ids in distinct if max(ids) < self.vocab_size]

    def _read_prompt(self, prompt: Any, num_new_tokens: int, name: str) -> tuple[list[int], str | None]:
        """The token ids of a prompt, and its text if it has one."""
        _check_is_one(prompt, name)
        given, text = prompt, prompt if isinstance(prompt, str) else None
        if isinstance(prompt, dict):
            has_one = prompt.keys() <= {"prompt", "prompt_token_ids"} and len(prompt) > 0
            check(has_one, f"{name} must have prompt or prompt_token_ids, and no other key", prompt)
            for key, value in prompt.items():
                if isinstance(value, str) != (key == "prompt"):
                    raise ValueError(f"{name}: {key} cannot be {shown(value)}")
            text = prompt.get("prompt")
            given = prompt.get("prompt_token_ids", text)
        token_ids = self.tokenize(given, name) if isinstance(given, str) else as_list(given)
        check(token_ids is not None, f"{name} must be a string or a list of token ids", given)
        token_ids = as_token_ids(token_ids, self.vocab_size, name)
        if not token_ids:
            raise ValueError(f"{name} is empty: {shown(given)}")
        try:
            self.limits.check(len(token_ids), num_new_tokens)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return token_ids, text

    def tokenize(self, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, but {self.model!r} has no tokenizer; pass token ids")
        if (place := find_surrogate(text)) >= 0:
            reason = f"the lone surrogate {text[place]!r} at {place} is no character"
            raise ValueError(f"{name} cannot be tokenized: {reason}; got {shown(text)}")
        try:
            with tokenizer_errors(f"the tokenizer of {self.model!r}"):
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ValueError(f"{name} cannot be tokenized: {error}; got {shown(text)}") from error

    def read_chats(self, messages: Any, *options: Any, **named_options: Any) -> list[list[int]]:
        """The token ids of one conversation or a list of them, see `LLM.chat`."""
        return [chat["prompt_token_ids"] for chat in self.render_chats(messages, *options, **named_options)]

    def render_chats(self, messages: Any, *options: Any, **named_options: Any) -> list[dict[str, Any]]:
        """One conversation or a list of them, see `LLM.chat`, as dicts of text and token ids."""
        chats = []
        for i, text in enumerate(render(self.tokenizer, self.model, messages, *options, **named_options)):
            # The template writes the special tokens itself.
            token_ids = self.tokenize(text, f"conversation {i}", add_special_tokens=False)
            chats.append({"prompt": text, "prompt_token_ids": token_ids})
        return chats

    def check_streamable(self, params: SamplingParams, objects: bool) -> None:
        check_bool(objects, "objects")
        if objects and params.n > 1:
            raise ValueError(f"stream gives one completion: it needs n=1, got n={params.n}")
        if not objects and (self.tokenizer is None or not params.detokenize or params.n > 1):
            rule = "stream gives the text of one completion: it needs a tokenizer, detokenize and n=1"
            raise ValueError(f"{rule}, got detokenize={params.detokenize} and n={params.n}")
