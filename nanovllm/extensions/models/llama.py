"""
Llama 2, 3 and what is built like them (SmolLM2, TinyLlama, ...): Qwen3 without norms on queries and keys.
"""

from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.extensions.models.facts import Facts, GGUFFacts
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Variant


class LlamaForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def variant(config: DecoderConfig) -> Variant:
        return Qwen3ForCausalLM.variant(config)._replace(qk_norm=False, mlp_bias=config.mlp_bias)


FACTS = Facts(LlamaForCausalLM, "llama", gguf=GGUFFacts("llama", rotates_neighbours=True))
