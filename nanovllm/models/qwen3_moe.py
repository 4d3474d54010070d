"""Qwen3-MoE (Qwen3-30B-A3B and its kind): Qwen3 with a mixture of experts in place of the MLP, in all layers
but those that the configuration leaves out.
"""

from torch import nn

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.kernels.router import Routing
from nanovllm.layers.moe import Experts, MixtureOfExperts, Router
from nanovllm.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        experts = config.experts
        if not experts.replaces_mlp(layer):
            return super().make_mlp(config, layer)
        routing = Routing(experts.num_experts_per_tok, experts.norm_topk_prob)
        return MixtureOfExperts(
            Router(config.hidden_size, experts.num_experts, routing),
            Experts(config.hidden_size, experts.moe_intermediate_size, experts.num_experts),
        )
