"""
Llama 2, 3 and what is built like them (SmolLM2, TinyLlama, ...): Qwen3 without norms on queries and keys.
"""

from nanovllm.extensions.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    model_type = gguf_name = "llama"
    defaults = {"mlp_bias": False}
    has_qk_norm = False
    gguf_rotates_neighbours = True
