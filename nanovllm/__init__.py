"""Nano-vLLM: a small, fast engine for offline LLM inference, written to be read.

Start at `LLM.generate` (llm.py) and follow it downwards.
"""

from nanovllm.async_llm import AsyncLLM
from nanovllm.engine_args import EngineArgs
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = ["AsyncLLM", "EngineArgs", "LLM", "SamplingParams", "StructuredOutputsParams"]
__version__ = "0.1.0"
