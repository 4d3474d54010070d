"""Qwen2 and Qwen2.5: Qwen3 without norms on queries and keys, with biases on their projections."""

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Variant


class Qwen2ForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def variant(config: ModelConfig) -> Variant:
        return Variant(qk_norm=False, qkv_bias=True, o_bias=False, mlp_bias=False)
