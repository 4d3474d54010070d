"""Prompts in every form that users have them: dicts, arrays, columns of a table, conversations, texts to be
scored.
"""

from collections.abc import Iterable
from numbers import Integral
from typing import Any, TypedDict

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.sequence import Request
from nanovllm.extensions.text.chat import as_conversations, as_list, render
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import check, is_number


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, and maybe the text that they are of."""

    prompt: str
    prompt_token_ids: Iterable[int]


Prompt = str | Iterable[int] | TextPrompt | TokensPrompt


class TextInputProcessor(InputProcessor):
    served = InputProcessor.served | {
        "n",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "detokenize",
    }

    def read_all(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """One prompt or several, with parameters for all or for each."""
        return super().read_all(self.as_prompts(prompts), sampling_params)

    def read(self, prompt: Any, sampling_params: Any, name: str = "prompt") -> Request:
        """One prompt, which messages call `name`, with parameters of its own."""
        return self.make_request(prompt, self.read_params(sampling_params, name), name)

    def is_slow(self, params: SamplingParams) -> bool:
        """Whether reading a request with these may take seconds."""
        return any(each.reads_slowly and each.wants(params) for each in self.processors)

    def as_prompts(self, prompts: Any) -> list[Any]:
        if isinstance(prompts, (str, dict)):
            return [prompts]
        found = as_list(prompts)
        rule = "prompts must be a string, a list of token ids, or a list (or another iterable) of these"
        check(found is not None, rule, prompts)
        return [found] if found and all(isinstance(p, Integral) for p in found) else found

    def make_request(self, prompt: Any, params: SamplingParams, name: str) -> Request:
        """Keeps the text of the prompt, unless that was given as token ids alone."""
        request = super().make_request(prompt, params, name)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str):
            request.own["text"] = text
        return request

    def read_prompt(self, prompt: Any, name: str) -> list[int]:
        given = prompt
        if isinstance(prompt, dict):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if not isinstance(given, str):
            given = as_list(given)
            check(given is not None, f"{name} must be a string or a list of token ids", prompt)
        return super().read_prompt(given, name)

    def read_scored(self, texts: Any, from_token: Any) -> list[tuple[list[int], Request]]:
        """The token ids of a text or a list of texts, and the request that scores them, see `LLM.score`."""
        texts = self.as_prompts(texts)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        if not isinstance(from_token, (list, tuple)):
            from_token = [from_token] * len(texts)
        if len(from_token) != len(texts):
            raise ValueError(f"there are {len(texts)} prompts but {len(from_token)} from_token")
        place = [processor.name for processor in self.processors].index("scores")
        scoring = self.processors[place].scoring
        found = []
        for i, (text, first) in enumerate(zip(texts, from_token, strict=True)):
            name = f"prompts[{i}]"
            ids = self.read_prompt(text, name)
            size = len(ids)
            self.check_length(size, 0, name)
            rule = f"from_token must be an integer from 0 to {size}, the tokens of {name}"
            check(is_number(first, int, 0, size), rule, first)
            own = {"scores": scoring(ids[1:], max(int(first) - 1, 0))}
            request = Request(ids[:-1], params, self.block_size, None, size, wanted=1 << place, own=own)
            found.append((ids, request))
        return found

    def render_chats(self, messages: Any, **options: Any) -> list[dict[str, Any]]:
        """One conversation or a list of them, see `LLM.chat`, as dicts of text and token ids."""
        self.check_chat_options(**options)
        conversations = as_conversations(messages)
        for i, conversation in enumerate(conversations):
            self.check_conversation(conversation, f"conversation {i}")
        texts = render(self.tokenizer, self.config.model, conversations, **options)
        chats = []
        for i, text in enumerate(texts):
            # The template writes the special tokens itself.
            token_ids = self.tokenize(text, f"conversation {i}", add_special_tokens=False)
            chats.append({"prompt": text, "prompt_token_ids": token_ids})
        return chats
