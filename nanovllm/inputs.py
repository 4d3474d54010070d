"""Prompts as dicts, under the names that scripts for vLLM import."""

from collections.abc import Iterable
from typing import TypedDict


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, and maybe the text that they are of."""

    prompt: str
    prompt_token_ids: Iterable[int]
