"""
Llama 2, 3 and what is built like them (SmolLM2, TinyLlama, ...): Qwen3 without norms on queries and keys.
"""

from collections.abc import Callable
from typing import Any

from nanovllm.extensions.models.config import Fields
from nanovllm.extensions.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    model_type = gguf_name = "llama"
    defaults = {"mlp_bias": False}
    has_qk_norm = False
    gguf_rotates_neighbours = True

    @staticmethod
    def read_gguf_fields(raw: Fields, number: Callable[..., Any], stored: Fields) -> Fields:
        if number("expert_count", 0):
            count, chosen = number("expert_count"), number("expert_used_count")
            return {"model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": chosen}
        window = number("attention.sliding_window", 0)
        return {"model_type": "mistral", "sliding_window": window} if window else {}
