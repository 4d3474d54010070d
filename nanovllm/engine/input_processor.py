"""Reads what users give: turns prompts into requests, or raises a ValueError that names what cannot be
served, before anything has changed.
"""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.limits import Limits
from nanovllm.engine.sequence import Request
from nanovllm.layers.sampler import selected
from nanovllm.sampling_params import SamplingParams, recommended_params
from nanovllm.utils.validation import check, is_number, shown

Prompt = str | list[int]


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
    # The fields of SamplingParams that the engine serves, beside those of its logits processors.
    served = frozenset("temperature max_tokens ignore_eos seed stop_token_ids".split())

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        limits: Limits,
        generation_config: dict[str, Any],
        processors: tuple[LogitsProcessor, ...],
    ):
        self.model, self.block_size = config.model, config.kvcache_block_size
        self.vocab_size = config.hf_config.vocab_size
        self.tokenizer, self.limits, self.processors = tokenizer, limits, processors
        self.generation_config = generation_config
        served = self.served.union(*(processor.fields for processor in processors))
        self.unserved = [field for field in fields(SamplingParams) if field.name not in served]

    def recommended(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends. Raises ValueError for a bad value."""
        return recommended_params(self.generation_config)

    def read_all(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """One prompt or a list of them, with parameters for all or for each; None: what is recommended."""
        prompts = self.as_prompts(prompts)
        each = self.recommended() if sampling_params is None else sampling_params
        each = each if isinstance(each, (list, tuple)) else [each] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(each)} sampling_params")
        checked: dict[int, SamplingParams] = {}  # by id: often all prompts have the same object
        requests = []
        for i, params in enumerate(each):
            if id(params) not in checked:
                checked[id(params)] = self.read_params(params, name_of(i))
            requests.append(self.make_request(prompts[i], checked[id(params)], i))
        for i, request in enumerate(requests):
            self.read_own(request, i)
        return requests

    def read(
        self, prompt: Any, sampling_params: Any = None, index: int | None = None, own: bool = True
    ) -> Request:
        """
        One prompt, or the index-th of several, with parameters of its own. Without `own` the caller calls
        `read_own`, which may take seconds.
        """
        if sampling_params is None and index is None:
            sampling_params = self.recommended()
        request = self.make_request(prompt, self.read_params(sampling_params, name_of(index)), index)
        if own:
            self.read_own(request, index)
        return request

    def make_request(self, prompt: Any, params: SamplingParams, index: int | None) -> Request:
        token_ids, text = self.read_prompt(prompt, name_of(index))
        wanted = sum(1 << i for i, processor in enumerate(self.processors) if processor.wants(params))
        return Request(token_ids, params, self.block_size, text=text, wanted=wanted)

    def read_own(self, request: Request, index: int | None = None) -> None:
        """Have the logits processors that it wants read a request. Any thread may call this."""
        for processor in selected(self.processors, request.wanted):
            where = f"sampling_params for {name_of(index)}"
            request.own[processor.name] = processor.read(request, where)

    def read_params(self, params: Any, name: str) -> SamplingParams:
        """A checked copy: fields may have been assigned to, and may be again while the request runs."""
        where = f"sampling_params for {name}"
        check(isinstance(params, SamplingParams), f"{where} must be SamplingParams", params)
        params = replace(params)
        for field in self.unserved:
            value = getattr(params, field.name)
            check(value == field.default, f"{where}: nothing here serves {field.name}", value)
        self.check_token_ids("stop_token_ids", params.stop_token_ids, where)
        return params

    def check_token_ids(self, name: str, token_ids: Iterable[int], where: str) -> None:
        """For ids that must be the model's."""
        highest, last = max(token_ids, default=0), self.vocab_size - 1
        check(highest <= last, f"{where}: token ids in {name} must be from 0 to {last}", highest)

    def as_prompts(self, prompts: Any) -> list[Any]:
        """One prompt or a list of them as a list."""
        check(isinstance(prompts, (str, list, tuple)), "prompts must be a text or a list", prompts)
        is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
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
        self.limits.check(len(token_ids), num_new_tokens, f"{name}: ")
        return token_ids, text

    def tokenize(self, text: str, name: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, but {self.model!r} has no tokenizer; pass token ids")
        return self.tokenizer.encode(text)
