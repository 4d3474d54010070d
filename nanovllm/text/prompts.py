"""Reads what users give as prompts: turns it into requests, or raises an error that names what cannot be
served, before anything has changed.
"""

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from nanovllm.checkpoints.tokenizer import tokenizer_errors
from nanovllm.config import Config
from nanovllm.engine.interfaces import LogitsProcessor, selected
from nanovllm.engine.limits import Limits
from nanovllm.engine.sequence import Sequence, pack
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
    wanted: int = 0  # the logits processors that it wants: bit i is the i-th of Parts
    own: dict[str, Any] = field(default_factory=dict)  # by logits processor, what it has read
    index: int = 0  # among the prompts of its call
    packed: bytes | None = None  # token_ids once more, see `Sequence.packed_prompt`
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
        self,
        config: Config,
        tokenizer: Any,
        limits: Limits,
        processors: tuple[LogitsProcessor, ...],
        generation_config: dict[str, Any],
    ):
        self.model = config.model
        self.vocab_size = config.hf_config.vocab_size
        self.tokenizer = tokenizer
        self.limits, self.processors = limits, processors
        self.generation_config = generation_config

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
            self.read_rest(request, i)
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
            request = Request(ids[:-1], params)
            request.wanted, request.own = self._scoring(ids[1:], max(int(first) - 1, 0))
            found.append((ids, request))
        return found

    def _scoring(self, targets: list[int], first: int) -> tuple[int, dict[str, Any]]:
        [i] = [i for i, processor in enumerate(self.processors) if processor.name == "scores"]
        return 1 << i, {"scores": self.processors[i].scoring(targets, first)}

    def read(self, prompt: Any, sampling_params: Any, index: int | None = None) -> Request:
        """One prompt, or the index-th of several, with parameters of its own."""
        request = self.read_at_once(prompt, sampling_params, index)
        self.read_rest(request, index)
        return request

    def read_at_once(self, prompt: Any, sampling_params: Any, index: int | None = None) -> Request:
        """The same but for what may take seconds: `read_rest` does that."""
        if sampling_params is None and index is None:
            sampling_params = self.recommended()
        params = self._check_params(sampling_params, _name(index))
        return self._read_checked(prompt, params, index)

    def _read_checked(self, prompt: Any, params: SamplingParams, index: int | None) -> Request:
        name = _name(index)
        token_ids, text = self._read_prompt(prompt, 1, name)
        where = f"sampling_params for {name}"
        self.check_has_tokenizer("stop", params.stop, where)
        self.check_token_ids("stop_token_ids", params.stop_token_ids, where)
        # While they are in the processor's cache: later it takes three times as long.
        request = Request(token_ids, params, index=index or 0, packed=pack(token_ids), text=text)
        for i, processor in enumerate(self.processors):
            if processor.wants(params):
                request.wanted |= 1 << i
                if not processor.reads_slowly:
                    request.own[processor.name] = processor.read(request, where)
        return request

    def has_rest(self, request: Request) -> bool:
        """Whether there is anything for `read_rest` to do."""
        return any(each.reads_slowly for each in selected(self.processors, request.wanted))

    def read_rest(self, request: Request, index: int | None = None) -> None:
        """Read what may take seconds. Any thread may call this."""
        for processor in selected(self.processors, request.wanted):
            if processor.reads_slowly:
                where = f"sampling_params for {_name(index)}"
                request.own[processor.name] = processor.read(request, where)

    @staticmethod
    def _check_params(params: Any, name: str) -> SamplingParams:
        """A checked copy: fields may have been assigned to, and may be again while the request runs."""
        rule = f"sampling_params for {name} must be SamplingParams"
        check(isinstance(params, SamplingParams), rule, params)
        return replace(params)

    def check_has_tokenizer(self, name: str, texts: tuple[str, ...], where: str) -> None:
        """For texts that have to be turned into tokens."""
        if texts and self.tokenizer is None:
            remedy = f"but {self.model!r} has no tokenizer; use stop_token_ids or logit_bias"
            raise ValueError(f"{where} have {name}={shown(texts)}, {remedy}")

    def check_token_ids(self, name: str, token_ids: Iterable[int], where: str) -> None:
        """For ids that must be the model's."""
        if (highest := max(token_ids, default=0)) >= self.vocab_size:
            rule = f"{where}: token ids in {name} must be from 0 to {self.vocab_size - 1}"
            raise ValueError(f"{rule}, got {shown(highest)}")

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
