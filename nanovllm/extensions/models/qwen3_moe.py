"""Qwen3-MoE (Qwen3-30B-A3B and its kind): Qwen3 with a mixture of experts in place of the MLP, in all layers
but those that the configuration leaves out.
"""

from torch import nn

from nanovllm.extensions.experts.kernels.router import Routing
from nanovllm.extensions.experts.moe import Experts, MixtureOfExperts, Router
from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.extensions.models.facts import EXPERTS, QWEN_WINDOW, Facts
from nanovllm.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        experts = config.experts
        if not experts.replaces_mlp(layer):
            return super().make_mlp(config, layer)
        routing = Routing(experts.num_experts_per_tok, experts.norm_topk_prob)
        return MixtureOfExperts(
            Router(config.hidden_size, experts.num_experts, routing),
            Experts(config.hidden_size, experts.moe_intermediate_size, experts.num_experts),
        )


DEFAULTS = (
    QWEN_WINDOW | EXPERTS | {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}
)
FACTS = Facts(Qwen3MoeForCausalLM, "qwen3_moe", DEFAULTS)
