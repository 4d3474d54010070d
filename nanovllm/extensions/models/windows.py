"""Gives the layers of a finished model the windows and scales that its checkpoint asks for."""

from torch import nn

from nanovllm.extensions.models.attention_rule import set_rule
from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.layers.rotary_embedding import get_rope


def set_attention(model: nn.Module, config: DecoderConfig) -> None:
    """Layers that attend to a window may have a rotation of their own (Gemma 3)."""
    if not config.architectures:  # transformers' modules say it themselves
        for attention in model.attention:
            set_rule(attention, **attention.features)
        return
    scale = config.query_pre_attn_scalar**-0.5
    local_rope = None
    if any(config.windows) and config.local_rope_parameters != config.rope_parameters:
        local_rope = get_rope(config.head_dim, config.max_model_len, config.local_rope_parameters)
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.attn.variant.scale = scale
        if config.windows[i]:
            set_rule(attention.attn, window=config.window(i))
            attention.rotary_emb = local_rope or attention.rotary_emb
