"""
Llama 2, 3 and what is built like them (SmolLM2, TinyLlama, ...): Qwen3 without norms on queries and keys.
"""

from nanovllm.extensions.models.decoder import Decoder
from nanovllm.extensions.models.gguf import Fields, GGUFModel, Number


def read_kind(fields: Fields, number: Number, stored: Fields) -> Fields:
    """Files of Mixtral and Mistral call themselves Llama's."""
    if fields["num_local_experts"]:
        return {"model_type": "mixtral", "num_experts_per_tok": number("expert_used_count")}
    return {"model_type": "mistral"} if fields["sliding_window"] else {}


class LlamaForCausalLM(Decoder):
    model_type = "llama"
    defaults = {"mlp_bias": False}
    has_qk_norm = False
    gguf = GGUFModel(
        "llama", "llama", "num_local_experts sliding_window", read_kind, gguf_rotates_neighbours=True
    )
