"""Reads what users give as prompts: turns it into token ids, and refuses what cannot be served by name and
value, before anything has changed.
"""

import functools
import itertools
import warnings
from numbers import Integral
from typing import Any

from nanovllm.checkpoints.tokenizer import render_chat, tokenizer_errors
from nanovllm.config import Config
from nanovllm.engine.edits import num_rule_words
from nanovllm.engine.scheduler import RULE_WORDS, Scheduler
from nanovllm.kernels.logit_edits import HISTORY
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import check_bool, find_surrogate, shown

# What `chat` passes to a chat template, which chat_template_kwargs cannot set too.
CHAT_OPTIONS = {"messages", "chat_template", "add_generation_prompt", "continue_final_message", "tools"}
CHAT_OPTIONS |= {"self", "conversation", "tokenize"}

Prompt = str | list[int] | dict[str, Any]
Messages = list[dict[str, Any]]


def as_token_ids(values: list | tuple, vocab_size: int, name: str) -> list[int]:
    """Token ids as a list of Python's integers. Raises ValueError for what is none."""
    token_ids = list(values)
    if set(map(type, token_ids)) - {int}:  # numpy's integers, or what is no token id at all
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise ValueError(f"{name}: token ids must be integers, got {shown(token_id)}")
        token_ids = [int(token_id) for token_id in token_ids]
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name}: token ids must be from 0 to {vocab_size - 1}, got {shown(token_id)}")
    return token_ids


class Prompts:
    """`scheduler` knows what can never fit, and what ends a request."""

    def __init__(self, config: Config, tokenizer: Any, scheduler: Scheduler):
        self.model = config.model
        self.vocab_size = config.hf_config.vocab_size
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self._bad_word = functools.lru_cache(1024)(self._read_bad_word)

    def read_all(self, prompts: Any, sampling_params: Any) -> list[tuple[list[int], SamplingParams]]:
        """
        One prompt or a list of them, and parameters for all or for each, as pairs. Warns of those that the
        context ends.
        """
        prompts = self._as_list(prompts)
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, (list, tuple)):
            raise ValueError(
                f"sampling_params must be SamplingParams or a list of them, got {shown(sampling_params)}"
            )
        if len(sampling_params) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(sampling_params)} sampling_params")
        pairs = enumerate(zip(prompts, sampling_params, strict=True))
        requests = [(self.read(prompt, params, f"prompts[{i}]"), params) for i, (prompt, params) in pairs]
        self.warn_of_context(requests)
        return requests

    def warn_of_context(
        self, requests: list[tuple[list[int], SamplingParams]], which: str | None = None
    ) -> bool:
        """Warn, once for all of them, of requests that the context may end before their max_tokens."""
        most = self.scheduler.max_num_tokens
        asked = [params.max_tokens for ids, params in requests if len(ids) + (params.max_tokens or 0) > most]
        if asked:
            found = sorted(set(asked))
            shown_values = ", ".join(map(str, found[:3])) + ", ..." * (len(found) > 3)
            warnings.warn(
                f"max_tokens={shown_values} reaches beyond the context of {most} tokens for "
                f"{which or f'{len(asked)} of {len(requests)} prompts'}: such a completion ends there, with "
                f"finish_reason 'length'",
                stacklevel=2,
            )
        return bool(asked)

    @staticmethod
    def _as_list(prompts: Any) -> list[Any]:
        if isinstance(prompts, (str, dict)):
            return [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise ValueError(
                f"prompts must be a string, a list of token ids, or a list of these, got {shown(prompts)}"
            )
        return [prompts] if prompts and all(isinstance(p, Integral) for p in prompts) else prompts

    def read_texts(self, texts: Any) -> list[list[int]]:
        """The token ids of a text or a list of texts that are complete."""
        return [self._read_token_ids(text, 0, f"prompts[{i}]") for i, text in enumerate(self._as_list(texts))]

    def read(self, prompt: Any, sampling_params: Any, name: str = "prompt") -> list[int]:
        """The token ids of one prompt."""
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(
                f"sampling_params for {name} must be SamplingParams, got {shown(sampling_params)}"
            )
        token_ids = self._read_token_ids(prompt, 1, name)
        self._check_params(sampling_params, name)
        return token_ids

    def _check_params(self, params: SamplingParams, name: str) -> None:
        """Raise ValueError for what this model cannot do."""
        for field in ("stop", "bad_words"):
            if (texts := getattr(params, field)) and self.tokenizer is None:
                raise ValueError(
                    f"sampling_params for {name} have {field}={shown(texts)}, but {self.model!r} "
                    f"has no tokenizer; use stop_token_ids or logit_bias"
                )
        named = {"allowed_token_ids": params.allowed_token_ids or (), "stop_token_ids": params.stop_token_ids}
        named["logit_bias"] = [token_id for token_id, _ in params.logit_bias]
        for field, token_ids in named.items():
            if token_ids and max(token_ids) >= self.vocab_size:
                raise ValueError(
                    f"sampling_params for {name}: token ids in {field} must be from 0 to "
                    f"{self.vocab_size - 1}, got {shown(max(token_ids))}"
                )
        bad_words, ends = self.bad_words(params), self.scheduler.end_token_ids(params)
        if (size := num_rule_words(params, bad_words, ends)) > RULE_WORDS:
            raise ValueError(
                f"sampling_params for {name}: bad_words of {sum(map(len, bad_words)):,} tokens and "
                f"logit_bias of {len(params.logit_bias):,} take {4 * size:,} bytes of the device's memory, "
                f"of which all requests together may have {4 * RULE_WORDS:,}"
            )
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed and ends.issuperset(allowed):
            raise ValueError(
                f"sampling_params for {name}: min_tokens={params.min_tokens} is not reached: each "
                f"of allowed_token_ids={shown(allowed)} ends a completion"
            )

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The bad words as token ids."""
        return list(itertools.chain.from_iterable(map(self._bad_word, params.bad_words)))

    def _read_bad_word(self, text: str) -> list[list[int]]:
        """
        As it is written at the beginning of a text and after a space, which most tokenizers write
        differently; without what has tokens that the model never draws.
        """
        starts = (start + text.lstrip(" ") for start in ("", " "))
        token_ids = [ids for start in starts if (ids := self.tokenize(start, "bad_words", False))]
        if not token_ids:
            raise ValueError(f"bad_words has {shown(text)}, of which the tokenizer makes no token")
        if (longest := max(map(len, token_ids))) > HISTORY:
            raise ValueError(
                f"each of bad_words must have at most {HISTORY} tokens, got {longest} of {shown(text)}"
            )
        distinct = [ids for i, ids in enumerate(token_ids) if ids not in token_ids[:i]]
        return [ids for ids in distinct if max(ids) < self.vocab_size]

    def _read_token_ids(self, prompt: Any, num_new_tokens: int, name: str) -> list[int]:
        if isinstance(prompt, dict):
            if list(prompt) not in (["prompt"], ["prompt_token_ids"]):
                raise ValueError(f"{name} must have one key, prompt or prompt_token_ids, got {shown(prompt)}")
            ((key, prompt),) = prompt.items()
            if isinstance(prompt, str) != (key == "prompt"):
                raise ValueError(f"{name}: {key} cannot be {shown(prompt)}")
        if isinstance(prompt, str):
            token_ids = self.tokenize(prompt, name)
        elif isinstance(prompt, (list, tuple)):
            token_ids = prompt
        else:
            raise ValueError(f"{name} must be a string or a list of token ids, got {shown(prompt)}")
        token_ids = as_token_ids(token_ids, self.vocab_size, name)
        if not token_ids:
            raise ValueError(f"{name} is empty: {shown(prompt)}")
        try:
            self.scheduler.check(len(token_ids), num_new_tokens)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return token_ids

    def tokenize(self, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, but {self.model!r} has no tokenizer; pass token ids")
        if (place := find_surrogate(text)) >= 0:
            raise ValueError(
                f"{name} cannot be tokenized: the lone surrogate {text[place]!r} at {place} is no character; "
                f"got {shown(text)}"
            )
        try:
            with tokenizer_errors(f"the tokenizer of {self.model!r}"):
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ValueError(f"{name} cannot be tokenized: {error}; got {shown(text)}") from error

    def read_chats(self, messages: Any, chat_template: str | None, **options: Any) -> list[list[int]]:
        """The token ids of one conversation or a list of them; the options go to the chat template."""
        for name in ("add_generation_prompt", "continue_final_message"):
            check_bool(options[name], name)
        if options["continue_final_message"] and options["add_generation_prompt"]:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False, got True")
        if not isinstance(chat_template, str | None):
            raise ValueError(f"chat_template must be a string, got {shown(chat_template)}")
        tools = options["tools"]
        if tools is not None and not (
            isinstance(tools, list) and all(isinstance(tool, dict) or callable(tool) for tool in tools)
        ):
            raise ValueError(f"tools must be a list of JSON schemas or functions, got {shown(tools)}")
        if not isinstance(messages, list) or not messages:
            raise ValueError(
                f"messages must be a conversation or a list of conversations, got {shown(messages)}"
            )
        conversations = [messages] if isinstance(messages[0], dict) else messages
        for i, conversation in enumerate(conversations):
            _check_conversation(conversation, f"conversation {i}")
        if self.tokenizer is None or (chat_template or self.tokenizer.chat_template) is None:
            raise ValueError(f"the tokenizer of {self.model!r} has no chat template")
        options["chat_template"] = chat_template
        token_ids = []
        for i, conversation in enumerate(conversations):
            try:
                text = render_chat(self.tokenizer, conversation, **options)
            except Exception as error:  # whatever a template raises
                raise ValueError(f"the chat template does not accept conversation {i}: {error}") from error
            # the template writes the special tokens itself
            token_ids.append(self.tokenize(text, f"conversation {i}", add_special_tokens=False))
        return token_ids

    def check_streamable(self, params: SamplingParams) -> None:
        if self.tokenizer is None or not params.detokenize or params.n > 1:
            raise ValueError(
                f"stream gives the text of one completion: it needs a tokenizer, detokenize and n=1, got "
                f"detokenize={params.detokenize} and n={params.n}"
            )


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """What the caller has for the chat template beyond the arguments of `chat`."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(f"chat_template_kwargs must be a dict of names and values, got {shown(kwargs)}")
    if taken := sorted(CHAT_OPTIONS & set(kwargs)):
        raise ValueError(f"chat_template_kwargs cannot have {taken[0]!r}, which chat itself sets")
    return kwargs


def _check_conversation(conversation: Any, name: str) -> None:
    allowed = f"{name} must be a list of dicts with role and content"
    if not isinstance(conversation, list) or not conversation:
        raise ValueError(f"{allowed}, got {shown(conversation)}")
    for message in conversation:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError(f"{allowed}, got {shown(message)}")
        if not isinstance(message["role"], str):
            raise ValueError(f"{name}: role must be a string, got {shown(message['role'])}")
        if not isinstance(message["content"], str | list | dict | None):
            raise ValueError(
                f"{name}: content must be a string, None, or parts that the template knows, got "
                f"{shown(message['content'])}"
            )
