"""Gemma 3 (text): most layers attend to a window of tokens, what is added to the residual is normalised
first, and embeddings are scaled.
"""

import torch

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.layers.activation import GeluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual_stream import Stream
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM


class Gemma3DecoderLayer(Qwen3DecoderLayer):
    """What attention and the MLP compute goes through a norm of its own before it is added."""

    def __init__(self, config: ModelConfig, *parts: torch.nn.Module):
        super().__init__(config, *parts)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.act_fn = GeluAndMul()

    def forward(self, positions: torch.Tensor, stream: Stream, next_norm: RMSNorm) -> Stream:
        attention, mlp, mlp_norm = self.self_attn, self.mlp, self.pre_feedforward_layernorm
        attended = attention.attend(positions, attention.qkv_proj(stream))
        stream = attention.o_proj.add_to(stream, attended, mlp_norm, self.post_attention_layernorm)
        activated = self.act_fn(mlp.gate_up_proj(stream))
        return mlp.down_proj.add_to(stream, activated, next_norm, self.post_feedforward_layernorm)


class Gemma3ForCausalLM(Qwen3ForCausalLM):
    layer_class = Gemma3DecoderLayer

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.model.embed_tokens.scale = config.hidden_size**0.5
        for norm in self.modules():
            if isinstance(norm, RMSNorm):
                norm.store_less_one()
