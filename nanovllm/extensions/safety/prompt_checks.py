"""Refuses prompts and conversations that cannot be served, with a message that names what is wrong with them.

It stands in front of what reads prompts, and changes nothing of what that returns.
"""

import warnings
from collections.abc import Iterable
from typing import Any

from nanovllm.engine.input_processor import InputProcessor, as_token_ids
from nanovllm.engine.sequence import Request
from nanovllm.extensions.safety.sampling_checks import find_surrogate
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import check, check_bool, shown

# What `chat` itself passes to a chat template: chat_template_kwargs must not set these.
CHAT_OPTIONS = {"messages", "chat_template", "add_generation_prompt", "continue_final_message", "tools"}
CHAT_OPTIONS |= {"self", "conversation", "tokenize"}
CONTENT_FORMATS = ("auto", "string", "openai")


class CheckedInputProcessor(InputProcessor):
    def tokenize(self, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for a text that the tokenizer cannot take."""
        if self.tokenizer is None:
            return super().tokenize(text, name)
        try:
            if (place := find_surrogate(text)) >= 0:
                raise ValueError(f"the lone surrogate {text[place]!r} at {place} is no character")
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ValueError(f"{name} cannot be tokenized: {error}; got {shown(text)}") from error

    def read_all(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """`InputProcessor.read_all`. Calls `warn_of_context`."""
        rule = "sampling_params must be SamplingParams, a list of them, or None"
        rule += " (what the checkpoint recommends)"
        check(isinstance(sampling_params, SamplingParams | list | tuple | None), rule, sampling_params)
        requests = super().read_all(prompts, sampling_params)
        self.warn_of_context(requests)
        return requests

    def read_prompt(self, prompt: Any, name: str) -> list[int]:
        """Raises ValueError for several prompts in the place of one, a conversation, or a dict of others."""
        first = prompt
        for _ in range(2):  # of a list of conversations or of token ids, too
            first = first[0] if isinstance(first, (list, tuple)) and first else first
        if isinstance(first, dict) and "role" in first:
            raise ValueError(f"{name} has messages of a conversation, which `chat` takes: {shown(prompt)}")
        if isinstance(first, str) and first is not prompt:
            raise ValueError(f"{name} must be one prompt; `generate` takes a list of texts: {shown(prompt)}")
        if isinstance(prompt, dict):
            has_one = prompt.keys() <= {"prompt", "prompt_token_ids"} and len(prompt) > 0
            check(has_one, f"{name} must have prompt or prompt_token_ids, and no other key", prompt)
            for key, value in prompt.items():
                if isinstance(value, str) != (key == "prompt"):
                    raise ValueError(f"{name}: {key} cannot be {shown(value)}")
        return super().read_prompt(prompt, name)

    def read_params(self, params: Any, name: str) -> SamplingParams:
        params = super().read_params(params, name)
        self.check_has_tokenizer("stop", params.stop, f"sampling_params for {name}")
        return params

    def check_token_ids(self, name: str, token_ids: Iterable[int], where: str) -> None:
        """For ids that must be the model's."""
        as_token_ids([*token_ids], self.vocab_size, f"{where}: token ids in {name}")

    def check_has_tokenizer(self, name: str, texts: tuple[str, ...], where: str) -> None:
        """For texts that have to be turned into tokens."""
        if texts and self.tokenizer is None:
            remedy = f"but {self.config.model!r} has no tokenizer; use stop_token_ids or logit_bias"
            raise ValueError(f"{where} have {name}={shown(texts)}, {remedy}")

    def warn_of_context(self, requests: list[Request], which: str | None = None) -> bool:
        """Warn once if the context may end some of these requests before they have max_tokens."""
        most = self.max_num_tokens
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

    def check_streamable(self, params: SamplingParams, objects: bool) -> None:
        check_bool(objects, "objects")
        if objects and params.n > 1:
            raise ValueError(f"stream gives one completion: it needs n=1, got n={params.n}")
        if not objects and (self.tokenizer is None or not params.detokenize or params.n > 1):
            rule = "stream gives the text of one completion: it needs a tokenizer, detokenize and n=1"
            raise ValueError(f"{rule}, got detokenize={params.detokenize} and n={params.n}")

    def check_chat_options(
        self,
        chat_template: Any = None,
        add_generation_prompt: Any = True,
        continue_final_message: Any = False,
        tools: Any = None,
        chat_template_kwargs: Any = None,
        chat_template_content_format: Any = "auto",
    ) -> None:
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
        form = chat_template_content_format
        rule = f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}"
        check(isinstance(form, str) and form in CONTENT_FORMATS, rule, form)

    def check_conversation(self, conversation: Any, name: str) -> None:
        rule = f"{name} must be a list of dicts with role and content, or tool_calls"
        check(isinstance(conversation, list | tuple) and conversation, rule, conversation)
        for message in conversation:
            has_content = isinstance(message, dict) and message.keys() & {"content", "tool_calls"}
            check(has_content and "role" in message, rule, message)
            role, content = map(message.get, ("role", "content"))
            check(isinstance(role, str), f"{name}: role must be a string", role)
            rule_of_content = f"{name}: content must be a string, None, or parts that the template knows"
            check(isinstance(content, str | list | dict | None), rule_of_content, content)
