"""The decoder of Qwen3's relatives: norms, biases, experts and windows are as its configuration says."""

from torch import nn

from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.models.attention_rule import set_rule
from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models.qwen3 import Qwen3ForCausalLM


class Decoder(Qwen3ForCausalLM):
    """Layers that attend to a window may have a rotation of their own (Gemma 3)."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        local, local_rope = config.local_rope_parameters, None
        if local != config.rope_parameters:
            local_rope = get_rope(config.head_dim, config.max_model_len, local)
        for i, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            attention.attn.variant.scale = config.query_pre_attn_scalar**-0.5
            if config.windows[i]:
                set_rule(attention.attn, window=config.window(i))
                attention.rotary_emb = local_rope or attention.rotary_emb

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        experts = config.experts
        if experts is not None and experts.replaces_mlp(layer):
            return MixtureOfExperts(config.hidden_size, experts)
        return super().make_mlp(config, layer)
