"""Prompts in every form that users have them: dicts, arrays, columns of a table, conversations, texts to be
scored.
"""

import warnings
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from nanovllm.checkpoints.tokenizer import tokenizer_errors
from nanovllm.engine.input_processor import InputProcessor, name_of
from nanovllm.engine.interfaces import selected
from nanovllm.engine.sequence import Request
from nanovllm.extensions.text.chat import as_list, render
from nanovllm.inputs import TextPrompt, TokensPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import check, check_bool, find_surrogate, is_number, shown

Prompt = str | Iterable[int] | TextPrompt | TokensPrompt


def _check_is_one(prompt: Any, name: str) -> None:
    """Raise ValueError for several prompts in the place of one, and for a conversation."""
    first = prompt
    for _ in range(2):  # of a list of conversations or of token ids, too
        first = first[0] if isinstance(first, (list, tuple)) and first else first
    if isinstance(first, dict) and "role" in first:
        raise ValueError(f"{name} has messages of a conversation, which `chat` takes: {shown(prompt)}")
    if isinstance(first, str) and first is not prompt:
        raise ValueError(f"{name} must be one prompt; `generate` takes a list of texts: {shown(prompt)}")


class TextInputProcessor(InputProcessor):
    served = InputProcessor.served | {
        "n",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "detokenize",
    }

    def recommended(self) -> SamplingParams:
        try:
            return super().recommended()
        except ValueError as error:
            raise ValueError(f"generation_config.json of {self.model!r}: {error}") from None

    def tokenize(self, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for a text that the tokenizer cannot take."""
        if self.tokenizer is None:
            return super().tokenize(text, name)
        try:
            if (place := find_surrogate(text)) >= 0:
                raise ValueError(f"the lone surrogate {text[place]!r} at {place} is no character")
            with tokenizer_errors(f"the tokenizer of {self.model!r}"):
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

    def is_slow(self, request: Request) -> bool:
        """Whether `read_own` may take seconds."""
        return any(each.reads_slowly for each in selected(self.processors, request.wanted))

    def read_params(self, params: Any, name: str) -> SamplingParams:
        params = super().read_params(params, name)
        self.check_has_tokenizer("stop", params.stop, f"sampling_params for {name}")
        return params

    def check_has_tokenizer(self, name: str, texts: tuple[str, ...], where: str) -> None:
        """For texts that have to be turned into tokens."""
        if texts and self.tokenizer is None:
            remedy = f"but {self.model!r} has no tokenizer; use stop_token_ids or logit_bias"
            raise ValueError(f"{where} have {name}={shown(texts)}, {remedy}")

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

    def as_prompts(self, prompts: Any) -> list[Any]:
        if isinstance(prompts, (str, dict)):
            return [prompts]
        found = as_list(prompts)
        rule = "prompts must be a string, a list of token ids, or a list (or another iterable) of these"
        check(found is not None, rule, prompts)
        return [found] if found and all(isinstance(p, Integral) for p in found) else found

    def read_prompt(self, prompt: Any, name: str, num_new_tokens: int = 1) -> tuple[list[int], str | None]:
        _check_is_one(prompt, name)
        given, text = prompt, None
        if isinstance(prompt, dict):
            has_one = prompt.keys() <= {"prompt", "prompt_token_ids"} and len(prompt) > 0
            check(has_one, f"{name} must have prompt or prompt_token_ids, and no other key", prompt)
            for key, value in prompt.items():
                if isinstance(value, str) != (key == "prompt"):
                    raise ValueError(f"{name}: {key} cannot be {shown(value)}")
            text = prompt.get("prompt")
            given = prompt.get("prompt_token_ids", text)
        if not isinstance(given, str):
            given = as_list(given)
            rule = f"{name} must be a string or a list of token ids"
            check(given is not None, rule, prompt)
        token_ids, own_text = super().read_prompt(given, name, num_new_tokens)
        return token_ids, own_text if text is None else text

    def read_scored(self, texts: Any, from_token: Any) -> list[tuple[list[int], Request]]:
        """The token ids of a text or a list of texts, and the request that scores them, see `LLM.score`."""
        texts = self.as_prompts(texts)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        first_tokens = from_token if isinstance(from_token, (list, tuple)) else [from_token] * len(texts)
        if len(first_tokens) != len(texts):
            raise ValueError(f"there are {len(texts)} prompts but {len(first_tokens)} from_token")
        found = []
        for i, (text, first) in enumerate(zip(texts, first_tokens, strict=True)):
            ids, _ = self.read_prompt(text, name_of(i), num_new_tokens=0)
            rule = f"from_token must be an integer from 0 to {len(ids)}, the tokens of prompts[{i}]"
            check(is_number(first, int, 0, len(ids)), rule, first)
            wanted, own = self._scoring(ids[1:], max(int(first) - 1, 0))
            found.append((ids, Request(ids[:-1], params, self.block_size, wanted=wanted, own=own)))
        return found

    def _scoring(self, targets: list[int], first: int) -> tuple[int, dict[str, Any]]:
        [i] = [i for i, processor in enumerate(self.processors) if processor.name == "scores"]
        return 1 << i, {"scores": self.processors[i].scoring(targets, first)}

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
