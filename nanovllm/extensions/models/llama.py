"""
Llama 2, 3 and what is built like them (SmolLM2, TinyLlama, ...): Qwen3 without norms on queries and keys.
"""

from nanovllm.extensions.models.facts import Facts, GGUFFacts

VARIANT = {"has_qk_norm": False}
DEFAULTS = {"mlp_bias": False}
FACTS = Facts("LlamaForCausalLM", "llama", DEFAULTS, VARIANT, GGUFFacts("llama", rotates_neighbours=True))
