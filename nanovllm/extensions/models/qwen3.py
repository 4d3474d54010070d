"""Qwen3, which the core has; its files may ask for windows besides."""

from nanovllm.extensions.models.facts import QWEN_WINDOW, Facts, GGUFFacts
from nanovllm.models.qwen3 import Qwen3ForCausalLM

DEFAULTS = QWEN_WINDOW | {"max_window_layers": 28, "head_dim": 128}
FACTS = Facts(Qwen3ForCausalLM, "qwen3", DEFAULTS, GGUFFacts("qwen3"))
