"""Qwen3, which the core has; its files may ask for windows besides."""

from nanovllm.extensions.models.facts import Facts, GGUFFacts

# Of all Qwen's files, which may have a window but do not use it.
WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
DEFAULTS = WINDOW | {"max_window_layers": 28, "head_dim": 128}
FACTS = Facts("Qwen3ForCausalLM", "qwen3", DEFAULTS, gguf=GGUFFacts("qwen3"))
