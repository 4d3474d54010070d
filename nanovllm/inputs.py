"""Prompts as dicts, under the names that scripts for vLLM import."""

from nanovllm.extensions.text.prompts import TextPrompt, TokensPrompt

__all__ = ["TextPrompt", "TokensPrompt"]
