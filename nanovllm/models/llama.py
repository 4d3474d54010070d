"""
Llama 2, 3 and what is built like them (SmolLM2, TinyLlama, ...): Qwen3 without norms on queries and keys.
"""

from typing import Any

from nanovllm.models.qwen3 import Qwen3ForCausalLM


class LlamaForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def variant(config: Any) -> dict[str, bool]:
        bias = bool(getattr(config, "attention_bias", False))
        return dict(
            qk_norm=False, qkv_bias=bias, o_bias=bias, mlp_bias=bool(getattr(config, "mlp_bias", False))
        )
