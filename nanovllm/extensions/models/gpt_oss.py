"""gpt-oss: Llama with a mixture of experts with biases in each layer, attention with sinks, and a window in
some layers.
"""

import torch
from torch import nn

from nanovllm.extensions.models.attention_rule import AttentionRule
from nanovllm.extensions.models.decoder import Decoder, DecoderConfig
from nanovllm.extensions.models.gguf import EXPERTS, Fields, GGUFModel, Number
from nanovllm.extensions.models.rope import read_object
from nanovllm.layers.linear import Shard, own_part

ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def read_gguf(fields: Fields, number: Number, stored: Fields) -> Fields:
    window = number("attention.sliding_window")  # which there must be
    return {"sliding_window": window, "rope_scaling": ROPE | (fields["rope_scaling"] or {})}


class GptOssForCausalLM(Decoder):
    model_type = "gpt_oss"
    defaults = {
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150000.0,
        "rope_scaling": ROPE,
    }
    has_qk_norm = False
    packed_modules_mapping = {f"{part}_proj": ("qkv_proj", part) for part in "qkv"}
    packed_modules_mapping["router"] = ("gate", None)
    gguf = GGUFModel("gpt-oss", "gpt_oss", EXPERTS, read_gguf)

    @staticmethod
    def read_facts(values: Fields) -> Fields:
        format = read_object(values, "quantization_config")
        return {"is_joint": True, "is_stored_together": format.get("quant_method") != "gguf"}

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        heads = config.num_attention_heads
        shard = Shard((heads, 1), own_part(heads))
        for i, layer in enumerate(self.model.layers):
            layer.self_attn.sinks = sinks = nn.Parameter(torch.empty(shard.size[0]), requires_grad=False)
            sinks.weight_loader = shard.load
            attention = layer.self_attn.attn
            attention.variant = AttentionRule(attention.variant.scale, config.window(i), sinks=sinks)
