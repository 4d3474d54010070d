"""Qwen2 and Qwen2.5: Qwen3 without norms on queries and keys, with biases on their projections."""

from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.extensions.models.facts import QWEN_WINDOW, Facts, GGUFFacts
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Variant


class Qwen2ForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def variant(config: DecoderConfig) -> Variant:
        return Variant(qk_norm=False, qkv_bias=True, o_bias=False, mlp_bias=False)


FACTS = Facts(Qwen2ForCausalLM, "qwen2", QWEN_WINDOW | {"max_window_layers": 28}, GGUFFacts("qwen2"))
