"""Qwen3-MoE (Qwen3-30B-A3B and its kind): Qwen3 with a mixture of experts in place of the MLP, in all layers
but those that the configuration leaves out.
"""

from collections.abc import Callable
from typing import Any

from nanovllm.extensions.models.config import Fields
from nanovllm.extensions.models.decoder import Decoder
from nanovllm.extensions.models.qwen3 import WINDOW


class Qwen3MoeForCausalLM(Decoder):
    model_type = "qwen3_moe"
    defaults = WINDOW | {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }

    gguf_name = "qwen3moe"

    @staticmethod
    def read_gguf_fields(raw: Fields, number: Callable[..., Any], stored: Fields) -> Fields:
        return {
            "num_experts": number("expert_count"),
            "num_experts_per_tok": number("expert_used_count"),
            "moe_intermediate_size": number("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
