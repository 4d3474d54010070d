"""Reads what users give: turns prompts into requests, or raises a ValueError that names what cannot be
served, before anything has changed.
"""

from collections.abc import Collection
from dataclasses import fields, replace
from itertools import count
from typing import Any, Protocol

from nanovllm.checkpoints.tokenizer import tokenizer_errors
from nanovllm.config import Config
from nanovllm.engine.limits import Limits
from nanovllm.engine.sequence import Request
from nanovllm.sampling_params import SamplingParams, recommended_params
from nanovllm.utils.validation import check, find_surrogate, is_number, shown

Prompt = str | list[int]


class RequestCheck(Protocol):
    """What a part of the engine does with a request before it is queued. Any thread may call it."""

    is_slow: bool  # it may take seconds

    def wants(self, params: SamplingParams) -> bool:
        """Whether `check` is to be called for a request with these."""

    def check(self, request: Request) -> None:
        """Put what it reads into `request.own`. Raises ValueError for what it cannot serve."""


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


def name_of(index: int | None) -> str:
    """What messages call a prompt, alone or the index-th of several."""
    return "prompt" if index is None else f"prompts[{index}]"


class InputProcessor:
    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        limits: Limits,
        generation_config: dict[str, Any],
        served: Collection[str],
        checks: list[RequestCheck],
    ):
        """`served` are the fields of SamplingParams that a part of the engine serves."""
        self.model, self.block_size = config.model, config.kvcache_block_size
        self.vocab_size = config.hf_config.vocab_size
        self.tokenizer, self.limits, self.checks = tokenizer, limits, checks
        self.generation_config = generation_config
        self.unserved = [field for field in fields(SamplingParams) if field.name not in served]

    def recommended(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends. Raises ValueError for a bad value."""
        try:
            return recommended_params(self.generation_config)
        except ValueError as error:
            raise ValueError(f"generation_config.json of {self.model!r}: {error}") from None

    def read_all(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """One prompt or a list of them, with parameters for all or for each."""
        prompts = self.as_prompts(prompts)
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
                checked[id(params)] = self._read_params(params, name_of(i))
        each = (checked[id(params)] for params in sampling_params)
        requests = list(map(self._read_checked, prompts, each, count()))
        for i, request in enumerate(requests):
            self.check(request, i, is_slow=True)
        return requests

    def read(self, prompt: Any, sampling_params: Any = None, index: int | None = None) -> Request:
        """One prompt, or the index-th of several, with parameters of its own."""
        request = self.read_quickly(prompt, sampling_params, index)
        self.check(request, index, is_slow=True)
        return request

    def read_quickly(self, prompt: Any, sampling_params: Any, index: int | None = None) -> Request:
        """The same without its slow checks."""
        if sampling_params is None and index is None:
            sampling_params = self.recommended()
        return self._read_checked(prompt, self._read_params(sampling_params, name_of(index)), index)

    def _read_checked(self, prompt: Any, params: SamplingParams, index: int | None) -> Request:
        token_ids, text = self.read_prompt(prompt, name_of(index))
        request = Request(token_ids, params, self.block_size, text=text)
        self.check(request, index, is_slow=False)
        return request

    def check(self, request: Request, index: int | None, is_slow: bool) -> None:
        """Run the slow checks, or the others. Any thread may call this."""
        for each in self.checks:
            if each.is_slow == is_slow and each.wants(request.params):
                try:
                    each.check(request)
                except ValueError as error:
                    raise ValueError(f"sampling_params for {name_of(index)}: {error}") from error

    def _read_params(self, params: Any, name: str) -> SamplingParams:
        """A checked copy: fields may have been assigned to, and may be again while the request runs."""
        rule = f"sampling_params for {name} must be SamplingParams"
        check(isinstance(params, SamplingParams), rule, params)
        params = replace(params)
        for field in self.unserved:
            is_default = getattr(params, field.name) == field.default
            rule = f"sampling_params for {name}: nothing here serves {field.name}"
            check(is_default, rule, getattr(params, field.name))
        highest = max(params.stop_token_ids, default=0)
        rule = f"sampling_params for {name}: token ids in stop_token_ids must be from 0 to"
        check(highest < self.vocab_size, f"{rule} {self.vocab_size - 1}", highest)
        return params

    def as_prompts(self, prompts: Any) -> list[Any]:
        """One prompt or a list of them as a list."""
        is_one = isinstance(prompts, str) or (prompts and all(isinstance(each, int) for each in prompts))
        return [prompts] if is_one else list(prompts)

    def read_prompt(self, prompt: Any, name: str, num_new_tokens: int = 1) -> tuple[list[int], str | None]:
        """The token ids of a prompt after which so many tokens are wanted, and its text if it has one."""
        text = prompt if isinstance(prompt, str) else None
        token_ids = prompt if text is None else self.tokenize(text, name)
        is_good = isinstance(token_ids, (list, tuple))
        check(is_good, f"{name} must be a string or a list of token ids", prompt)
        token_ids = as_token_ids(token_ids, self.vocab_size, name)
        if not token_ids:
            raise ValueError(f"{name} is empty: {shown(prompt)}")
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
