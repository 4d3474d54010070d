"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 with a mixture of experts in place of the MLP, beside
which an MLP computes all tokens, with a gate.
"""

from nanovllm.extensions.models.gguf import EXPERTS, GGUFModel
from nanovllm.extensions.models.qwen2 import Qwen2ForCausalLM
from nanovllm.extensions.models.qwen3_moe import Qwen3MoeForCausalLM


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    model_type = "qwen2_moe"
    needs_layer_types = True
    defaults = Qwen3MoeForCausalLM.defaults | {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }
    # The gate of the MLP for all tokens is the router's last row.
    packed_modules_mapping = Qwen2ForCausalLM.packed_modules_mapping | {
        "shared_expert_gate": ("gate", "shared"),
        "gate": ("gate", None),
    }
    gguf = GGUFModel(
        "qwen2moe", "qwen2_moe", f"{EXPERTS} moe_intermediate_size shared_expert_intermediate_size"
    )
