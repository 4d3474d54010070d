"""gpt-oss: a mixture of experts with biases in each layer, attention with sinks, a window in some layers."""

import torch
from torch import nn

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.kernels.router import Routing
from nanovllm.layers.moe import Experts, JointLinear, MixtureOfExperts, Router
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Variant
from nanovllm.utils.loader import default_weight_loader


class GptOssForCausalLM(Qwen3ForCausalLM):
    packed_modules_mapping = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "router": ("gate", None),
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.sinks = sinks = make_sinks(layer.self_attn)
            layer.self_attn.attn.rule = layer.self_attn.attn.rule._replace(sinks=sinks)

    @staticmethod
    def variant(config: ModelConfig) -> Variant:
        bias = config.attention_bias
        return Variant(qk_norm=False, qkv_bias=bias, o_bias=bias, mlp_bias=False)

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        experts, hidden_size = config.experts, config.hidden_size
        routing = Routing(experts.num_experts_per_tok)
        sizes = hidden_size, experts.moe_intermediate_size, experts.num_experts
        return MixtureOfExperts(
            Router(hidden_size, experts.num_experts, routing, bias=True),
            Experts(*sizes, JointLinear, bias=True, is_clamped=True),
        )


def make_sinks(attention: Qwen3Attention) -> nn.Parameter:
    """[heads of this rank]."""
    group, heads = attention.qkv_proj.group, attention.attn.num_heads
    sinks = nn.Parameter(torch.empty(heads), requires_grad=False)
    mine, shape = slice(group.rank * heads, group.rank * heads + heads), (group.size * heads,)
    sinks.weight_loader = lambda param, loaded: default_weight_loader(param, loaded, mine, shape)
    return sinks
