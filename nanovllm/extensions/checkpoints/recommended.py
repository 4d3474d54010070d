"""The parameters that a checkpoint recommends in its generation_config.json."""

from typing import Any

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.extensions.checkpoints.library_errors import library_errors
from nanovllm.sampling_params import SamplingParams

# Fields of generation_config.json, and those of SamplingParams for which they are recommended.
NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
NAMES |= {"max_new_tokens": "max_tokens"}


class RecommendingLLM(LLMEngine):
    def start_runner(self, checkpoint: Checkpoint) -> None:
        self.generation_config = checkpoint.generation_config()
        super().start_runner(checkpoint)

    def default_sampling_params(self, **others: Any) -> SamplingParams:
        """
        What the checkpoint's generation_config.json recommends: temperature (0 where do_sample is false),
        top_p, top_k, min_p, repetition_penalty and, as max_tokens, max_new_tokens. `others` count where it
        says nothing. Raises ValueError for a bad value.
        """
        found = others | self.generation_config
        values = {own: found[name] for name, own in NAMES.items() if found.get(name) is not None}
        if found.get("do_sample") is False:
            values["temperature"] = 0.0
        with library_errors(f"generation_config.json of {self.config.model!r}"):
            return SamplingParams(**values)

    get_default_sampling_params = default_sampling_params

    def or_recommended(self, params: Any) -> Any:
        """The parameters of a call, or what the checkpoint recommends if none were given."""
        return self.default_sampling_params() if params is None else params
