"""What users call. Follow `LLMEngine.generate` downwards."""

from nanovllm.assembly import assemble, extend, open_model
from nanovllm.engine.llm_engine import LLMEngine


@extend
class LLM(LLMEngine):
    """
    `LLM(model, **options)`: options are the fields of `Config`.

    After any exception inside `generate` and its kin the engine is empty and usable: no request left, all
    blocks free.
    """

    assembly = f"{assemble.__module__}:{assemble.__name__}"
    open_model = staticmethod(open_model)
