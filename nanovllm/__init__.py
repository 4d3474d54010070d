"""Nano-vLLM: a small, fast engine for offline LLM inference, written to be read.

Start at `LLM.generate` (llm.py) and follow it downwards.
"""

__all__ = ["LLM", "SamplingParams"]  # extensions/api adds names of extensions
__version__ = "0.1.0"

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
