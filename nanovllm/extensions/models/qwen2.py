"""Qwen2 and Qwen2.5: Qwen3 without norms on queries and keys, with biases on their projections."""

from dataclasses import replace

from nanovllm.extensions.models.decoder import Decoder, DecoderConfig
from nanovllm.extensions.models.gguf import GGUFModel
from nanovllm.extensions.models.qwen3 import WINDOW


class Qwen2ForCausalLM(Decoder):
    model_type = "qwen2"
    gguf = GGUFModel("qwen2", "qwen2")
    defaults = WINDOW | {"max_window_layers": 28}
    has_qk_norm = False
    has_output_bias = False

    def __init__(self, config: DecoderConfig):
        super().__init__(replace(config, attention_bias=True))  # whatever files say
