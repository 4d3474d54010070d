"""Nano-vLLM: a small, fast engine for offline LLM inference, written to be read.

Start at `LLM.generate` (llm.py) and follow it downwards.
"""

import importlib
from typing import Any

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

# Names of extensions, each imported when it is first asked for.
PLACES = {
    "AsyncLLM": "nanovllm.extensions.api.async_llm",
    "CompletionOutput": "nanovllm.outputs",
    "EngineArgs": "nanovllm.extensions.api.engine_args",
    "RequestOutput": "nanovllm.outputs",
    "StructuredOutputsParams": "nanovllm.extensions.structured.params",
    "TextPrompt": "nanovllm.inputs",
    "TokensPrompt": "nanovllm.inputs",
}
__all__ = ["LLM", "SamplingParams", *PLACES]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)
