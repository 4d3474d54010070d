"""Qwen3, which the core has; its files may ask for windows besides."""

from nanovllm.extensions.models.decoder import Decoder
from nanovllm.extensions.models.gguf import GGUFModel

# Of all Qwen's files, which may have a window but do not use it.
WINDOW = {"use_sliding_window": False, "sliding_window": 4096}


class Qwen3ForCausalLM(Decoder):
    model_type = "qwen3"
    gguf = GGUFModel("qwen3", "qwen3")
    defaults = WINDOW | {"max_window_layers": 28, "head_dim": 128}
