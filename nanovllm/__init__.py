"""Nano-vLLM: a small, fast engine for offline LLM inference, written to be read.

Start at `LLM.generate` (llm.py) and follow it downwards.
"""

from nanovllm.extensions.api.async_llm import AsyncLLM
from nanovllm.extensions.api.engine_args import EngineArgs
from nanovllm.inputs import TextPrompt, TokensPrompt
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "AsyncLLM", "CompletionOutput", "EngineArgs", "LLM", "RequestOutput", "SamplingParams",
    "StructuredOutputsParams", "TextPrompt", "TokensPrompt",
]  # fmt: skip
__version__ = "0.1.0"
