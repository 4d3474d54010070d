"""Qwen3-MoE (Qwen3-30B-A3B and its kind): Qwen3 with a mixture of experts in place of the MLP, in all layers
but those that the configuration leaves out.
"""

from nanovllm.extensions.models.decoder import Decoder
from nanovllm.extensions.models.gguf import EXPERTS, Fields, GGUFModel, Number
from nanovllm.extensions.models.qwen3 import WINDOW


def read_gguf(fields: Fields, number: Number, stored: Fields) -> Fields:
    return {"norm_topk_prob": True}


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
    gguf = GGUFModel("qwen3moe", "qwen3_moe", f"{EXPERTS} moe_intermediate_size", read_gguf)
