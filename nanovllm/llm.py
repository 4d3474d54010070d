"""`LLM` is the engine under the name that users know."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """`LLM(model, **options)`: see `LLMEngine` for the methods and `Config` for the options."""
