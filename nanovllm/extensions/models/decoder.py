"""The decoder of Qwen3's relatives: the core's, of which parts are replaced as the configuration says."""

from dataclasses import replace

from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.models.attention_rule import set_rule
from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Qwen3MLP


class Decoder(Qwen3ForCausalLM):
    """Layers that attend to a window may have a rotation of their own (Gemma 3)."""

    # What a model's `Facts` change.
    has_qk_norm = True
    has_qkv_bias_alone = False  # on these projections always, and nowhere else
    has_joint_experts = False  # see MixtureOfExperts

    def __init__(self, config: DecoderConfig):
        super().__init__(replace(config, attention_bias=config.attention_bias or self.has_qkv_bias_alone))
        local, local_rope = config.local_rope_parameters, None
        if local != config.rope_parameters:
            local_rope = get_rope(config.head_dim, config.max_model_len, local)
        experts, hidden_size = config.experts, config.hidden_size
        for i, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            attention.attn.variant.scale = config.query_pre_attn_scalar**-0.5
            if config.windows[i]:
                set_rule(attention.attn, window=config.window(i))
                attention.rotary_emb = local_rope or attention.rotary_emb
            if not self.has_qk_norm:
                attention.q_norm = attention.k_norm = None
            if self.has_qkv_bias_alone:
                attention.o_proj.bias = None
            if experts is not None and experts.replaces_mlp(i):
                layer.mlp = MixtureOfExperts(hidden_size, experts, self.has_joint_experts)
            elif config.mlp_bias:
                layer.mlp = Qwen3MLP(hidden_size, config.intermediate_size, bias=True)
