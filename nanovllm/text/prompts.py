"""Reads what users give as prompts: turns it into requests, or raises an error that names what cannot be
served, before anything has changed.
"""

import functools
import itertools
import warnings
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from nanovllm.checkpoints.tokenizer import render_chat, tokenizer_errors
from nanovllm.config import Config
from nanovllm.engine.edits import HISTORY, num_rule_words
from nanovllm.engine.limits import RULE_WORDS, Limits
from nanovllm.engine.sequence import Sequence, pack
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.grammar import Grammars
from nanovllm.utils.validation import check, check_bool, find_surrogate, is_number, shown

# What `chat` itself passes to a chat template: chat_template_kwargs must not set these.
CHAT_OPTIONS = {"messages", "chat_template", "add_generation_prompt", "continue_final_message", "tools"}
CHAT_OPTIONS |= {"self", "conversation", "tokenize"}

Prompt = str | list[int] | dict[str, Any]
Messages = list[dict[str, Any]]


@dataclass(eq=False, slots=True)
class Request:
    """A prompt that has been read, and its parameters; once it is queued, also its `completions`."""

    token_ids: list[int] = field(default_factory=list)
    params: SamplingParams = SamplingParams()
    bad_words: list[list[int]] = field(default_factory=list)  # as token ids
    num_rule_words: int = 0  # int32 that its rules take on a device
    scored_token_ids: list[int] = field(default_factory=list)  # the i-th is scored as what follows token i
    index: int = 0  # among the prompts of its call
    packed: bytes | None = None  # token_ids once more, see `Sequence.packed_prompt`
    grammar: Any = None  # compiled structured outputs
    error: Exception | None = None  # why it could not be read
    completions: list[Sequence] = field(default_factory=list)


def as_token_ids(values: list | tuple, vocab_size: int, name: str) -> list[int]:
    """Token ids as a list of Python's integers. Raises ValueError for anything else."""
    token_ids = list(values)
    if set(map(type, token_ids)) - {int}:  # numpy's integers, or what is no token id at all
        for token_id in token_ids:
            check(is_number(token_id, int), f"{name}: token ids must be integers", token_id)
        token_ids = [int(token_id) for token_id in token_ids]
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: token ids must be from 0 to {vocab_size - 1}, got {shown(wrong)}")
    return token_ids


class Prompts:
    def __init__(self, config: Config, tokenizer: Any, limits: Limits, grammars: Grammars):
        self.model = config.model
        self.vocab_size = config.hf_config.vocab_size
        self.tokenizer = tokenizer
        self.limits, self.grammars = limits, grammars
        self._bad_word = functools.lru_cache(1024)(self._read_bad_word)

    def read_all(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """One prompt or a list of them, with parameters for all or for each. Calls `warn_of_context`."""
        prompts = self._as_list(prompts)
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        rule = "sampling_params must be SamplingParams or a list of them"
        check(isinstance(sampling_params, (list, tuple)), rule, sampling_params)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(sampling_params)} sampling_params")
        requests = list(map(self.read, prompts, sampling_params, itertools.count()))
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
        rule = "prompts must be a string, a list of token ids, or a list of these"
        check(isinstance(prompts, (list, tuple)), rule, prompts)
        return [prompts] if prompts and all(isinstance(p, Integral) for p in prompts) else prompts

    def read_texts(self, texts: Any) -> list[list[int]]:
        """The token ids of a text or a list of texts, after which nothing is drawn."""
        return [self._read_token_ids(text, 0, f"prompts[{i}]") for i, text in enumerate(self._as_list(texts))]

    def read(self, prompt: Any, sampling_params: Any, index: int | None = None) -> Request:
        """One prompt, or the index-th of several."""
        name = "prompt" if index is None else f"prompts[{index}]"
        if not isinstance(sampling_params, SamplingParams):
            found = shown(sampling_params)
            raise ValueError(f"sampling_params for {name} must be SamplingParams, got {found}")
        token_ids = self._read_token_ids(prompt, 1, name)
        bad_words, num_rule_words = self._read_rules(sampling_params, name)
        grammar = self._read_grammar(sampling_params, name)
        scored_token_ids = [] if sampling_params.prompt_logprobs is None else token_ids[1:]
        packed = pack(
            token_ids
        )  # while they are in the processor's cache: later it takes three times as long
        rest = num_rule_words, scored_token_ids, index or 0, packed
        return Request(token_ids, sampling_params, bad_words, *rest, grammar)

    def _read_grammar(self, params: SamplingParams, name: str) -> Any:
        if params.structured_outputs is None:
            return None
        try:
            return self.grammars.compile(params.structured_outputs)
        except ValueError as error:
            raise ValueError(f"sampling_params for {name}: {error}") from error

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

    def _read_token_ids(self, prompt: Any, num_new_tokens: int, name: str) -> list[int]:
        if isinstance(prompt, dict):
            has_one_key = list(prompt) in (["prompt"], ["prompt_token_ids"])
            check(has_one_key, f"{name} must have one key, prompt or prompt_token_ids", prompt)
            ((key, prompt),) = prompt.items()
            if isinstance(prompt, str) != (key == "prompt"):
                raise ValueError(f"{name}: {key} cannot be {shown(prompt)}")
        if not isinstance(prompt, (str, list, tuple)):
            raise ValueError(f"{name} must be a string or a list of token ids, got {shown(prompt)}")
        token_ids = self.tokenize(prompt, name) if isinstance(prompt, str) else prompt
        token_ids = as_token_ids(token_ids, self.vocab_size, name)
        if not token_ids:
            raise ValueError(f"{name} is empty: {shown(prompt)}")
        try:
            self.limits.check(len(token_ids), num_new_tokens)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return token_ids

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

    def read_chats(
        self, messages: Any, chat_template: str | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: list[Any] | None = None, chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """The token ids of one conversation or a list of them, see `LLM.chat`."""
        check_bool(add_generation_prompt, "add_generation_prompt")
        check_bool(continue_final_message, "continue_final_message")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False, got True")
        check(isinstance(chat_template, str | None), "chat_template must be a string", chat_template)
        are_tools = isinstance(tools, list) and all(
            isinstance(tool, dict) or callable(tool) for tool in tools
        )
        check(tools is None or are_tools, "tools must be a list of JSON schemas or functions", tools)
        kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
        are_named = isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)
        check(are_named, "chat_template_kwargs must be a dict of names and values", kwargs)
        if taken := sorted(CHAT_OPTIONS & set(kwargs)):
            raise ValueError(f"chat_template_kwargs cannot have {taken[0]!r}, which chat itself sets")
        is_list = isinstance(messages, list) and len(messages) > 0
        check(is_list, "messages must be a conversation or a list of conversations", messages)
        conversations = [messages] if isinstance(messages[0], dict) else messages
        for i, conversation in enumerate(conversations):
            _check_conversation(conversation, f"conversation {i}")
        if self.tokenizer is None or (chat_template or self.tokenizer.chat_template) is None:
            raise ValueError(f"the tokenizer of {self.model!r} has no chat template")
        options = dict(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        token_ids = []
        for i, conversation in enumerate(conversations):
            try:
                text = render_chat(self.tokenizer, conversation, **options, **kwargs)
            except Exception as error:  # whatever a template raises
                raise ValueError(f"the chat template does not accept conversation {i}: {error}") from error
            # The template writes the special tokens itself.
            token_ids.append(self.tokenize(text, f"conversation {i}", add_special_tokens=False))
        return token_ids

    def check_streamable(self, params: SamplingParams) -> None:
        if self.tokenizer is None or not params.detokenize or params.n > 1:
            rule = "stream gives the text of one completion: it needs a tokenizer, detokenize and n=1"
            raise ValueError(f"{rule}, got detokenize={params.detokenize} and n={params.n}")


def _check_conversation(conversation: Any, name: str) -> None:
    rule = f"{name} must be a list of dicts with role and content"
    check(isinstance(conversation, list) and len(conversation) > 0, rule, conversation)
    for message in conversation:
        check(isinstance(message, dict) and {"role", "content"} <= message.keys(), rule, message)
        role, content = message["role"], message["content"]
        check(isinstance(role, str), f"{name}: role must be a string", role)
        rule_of_content = f"{name}: content must be a string, None, or parts that the template knows"
        check(isinstance(content, str | list | dict | None), rule_of_content, content)
