"""Reads what users give: turns prompts into requests, or raises a ValueError that names what cannot be
served, before anything has changed.
"""

from dataclasses import fields, replace
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Request
from nanovllm.layers.sampler import selected
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import MAX_INT, check, number, shown

Prompt = str | list[int]


def as_token_ids(values: Any, vocab_size: int, what: str) -> list[int]:
    """Token ids as a list of Python's integers. Raises ValueError for anything else; messages say `what`."""
    check(isinstance(values, (list, tuple)), f"{what} must be a list", values)
    token_ids, last = list(values), vocab_size - 1
    as_token_id = number(0, last, f"integers from 0 to {last}", int)
    if set(map(type, token_ids)) - {int}:  # numpy's integers, or what is no token id at all
        token_ids = [as_token_id(token_id, what) for token_id in token_ids]
    for extreme in min(token_ids, default=0), max(token_ids, default=0):
        as_token_id(extreme, what)
    return token_ids


class InputProcessor:
    # The fields of SamplingParams that the engine serves, beside those of its logits processors.
    served = frozenset("temperature max_tokens ignore_eos seed stop_token_ids extra".split())

    def __init__(self, config: Config, tokenizer: Any, processors: tuple[LogitsProcessor, ...]):
        self.config, self.tokenizer, self.processors = config, tokenizer, processors
        self.block_size = config.kvcache_block_size
        self.vocab_size = config.hf_config.vocab_size
        self.eos = frozenset(config.eos)
        # In the longest sequence, whose last token needs no room in the cache: nothing is computed after it.
        num_cache_tokens = config.num_kvcache_blocks * config.kvcache_block_size
        self.max_num_tokens = min(config.max_model_len, num_cache_tokens + 1)
        served = self.served.union(*(processor.fields for processor in processors))
        self.unserved = [field for field in fields(SamplingParams) if field.name not in served]

    def read_all(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """A list of prompts, with parameters for all or for each."""
        check(isinstance(prompts, (list, tuple)), "prompts must be a list", prompts)
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(sampling_params)} sampling_params")
        checked = {}  # SamplingParams by id: often all prompts have the same object
        requests = []
        for i, params in enumerate(sampling_params):
            name = f"prompts[{i}]"
            if id(params) not in checked:
                checked[id(params)] = self.read_params(params, name)
            requests.append(self.make_request(prompts[i], checked[id(params)], name))
        return requests

    def read_params(self, params: Any, name: str) -> SamplingParams:
        """A checked copy: fields may have been assigned to, and may be again while the request runs."""
        where = f"sampling_params for {name}"
        check(isinstance(params, SamplingParams), f"{where} must be SamplingParams", params)
        params = replace(params)
        for field in self.unserved:
            value = getattr(params, field.name)
            check(value == field.default, f"{where}: nothing here serves {field.name}", value)
        ids, what = params.stop_token_ids or (), f"{where}: token ids in stop_token_ids"
        params.stop_token_ids = tuple(as_token_ids(ids, self.vocab_size, what))
        return params

    def make_request(self, prompt: Any, params: SamplingParams, name: str) -> Request:
        """A prompt with parameters that `read_params` has read. Messages call the prompt `name`."""
        token_ids = self.read_prompt(prompt, name)
        self.check_length(len(token_ids), 1, name)
        most = len(token_ids) + (params.max_tokens or MAX_INT)
        ends = frozenset() if params.ignore_eos else self.eos
        request = Request(
            token_ids,
            params,
            self.block_size,
            params.seed,
            min(most, self.max_num_tokens),
            ends.union(params.stop_token_ids),
            wanted=sum(1 << i for i, processor in enumerate(self.processors) if processor.wants(params)),
        )
        for processor in selected(self.processors, request.wanted):
            request.own[processor.name] = processor.read(request, f"sampling_params for {name}")
        return request

    def check_length(self, num_prompt_tokens: int, num_tokens: int, name: str) -> None:
        """Raise ValueError if a sequence with so many tokens behind its prompt could never be computed."""
        total, config = num_prompt_tokens + num_tokens, self.config
        if total <= self.max_num_tokens:
            return
        length, longest = config.max_model_len, config.hf_config.context_limit
        if total > length:
            limit = f"max_model_len is {length}, and the checkpoint's own limit {longest}"
        else:
            limit = f"{config.num_kvcache_blocks} KV cache blocks of {self.block_size} tokens are enough for "
            limit += f"{self.max_num_tokens}; raise num_kvcache_blocks or gpu_memory_utilization"
        needed = f"the prompt has {num_prompt_tokens} tokens and needs room for {total}"
        raise ValueError(f"{name}: {needed}, but {limit}")

    def read_prompt(self, prompt: Any, name: str) -> list[int]:
        """The token ids of a prompt."""
        given = self.tokenize(prompt, name) if isinstance(prompt, str) else prompt
        token_ids = as_token_ids(given, self.vocab_size, f"{name}: token ids")
        if not token_ids:
            raise ValueError(f"{name} is empty: {shown(prompt)}")
        return token_ids

    def tokenize(self, text: str, name: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, but {self.config.model!r} has no tokenizer; pass token ids")
        return self.tokenizer.encode(text)
