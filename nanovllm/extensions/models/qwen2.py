"""Qwen2 and Qwen2.5: Qwen3 without norms on queries and keys, with biases on their projections."""

from nanovllm.extensions.models.facts import Facts, GGUFFacts
from nanovllm.extensions.models.qwen3 import WINDOW

VARIANT = {"has_qk_norm": False, "has_qkv_bias_alone": True}
FACTS = Facts("Qwen2ForCausalLM", "qwen2", WINDOW | {"max_window_layers": 28}, VARIANT, GGUFFacts("qwen2"))
