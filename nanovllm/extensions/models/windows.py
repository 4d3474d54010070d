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
    if config.query_pre_attn_scalar != config.head_dim:
        for layer in model.model.layers:
            layer.self_attn.attn.variant.scale = config.query_pre_attn_scalar**-0.5
    if not any(config.windows):
        return
    is_local_rope = config.local_rope_parameters != config.rope_parameters
    local_rope = get_rope(config.head_dim, config.max_model_len, config.local_rope_parameters)
    for i, layer in enumerate(model.model.layers):
        if config.windows[i]:
            set_rule(layer.self_attn.attn, window=config.window(i))
            if is_local_rope:
                layer.self_attn.rotary_emb = local_rope
