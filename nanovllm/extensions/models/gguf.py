"""What GGUF files say of a model, as the fields of its configuration.

A model that has a class here says in its `gguf` how files store it; BY_TRANSFORMERS says it of those that
transformers builds. What a file leaves out, the configuration has as a default. Names of tensors are in the
tables of the gguf package.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanovllm.extensions.models.rope import FULL, SLIDING, Fields
from nanovllm.utils.validation import check

# (key, default, kind) -> what the file has there. Raises ValueError naming the key.
Number = Callable[..., Any]
# Of a field the key, the default and the kind. Without a default files must have it.
KEYS = {
    "sliding_window": ("attention.sliding_window", 0),
    "attn_logit_softcapping": ("attn_logit_softcapping", 0.0, float),
    "final_logit_softcapping": ("final_logit_softcapping", 0.0, float),
    "rope_local_base_freq": ("rope.freq_base_swa", 10000.0, float),
    "logit_scale": ("logit_scale", None, float),
    "logits_scaling": ("logit_scale", 1.0, float),
    "attention_multiplier": ("attention.scale", None, float),
    "embedding_multiplier": ("embedding_scale", 1.0, float),
    "residual_multiplier": ("residual_scale", 1.0, float),
    "num_experts": ("expert_count",),
    "num_local_experts": ("expert_count", 0),
    "n_routed_experts": ("expert_count",),
    "num_experts_per_tok": ("expert_used_count",),
    "moe_intermediate_size": ("expert_feed_forward_length",),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length",),
    "n_shared_experts": ("expert_shared_count",),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0, float),
    "norm_topk_prob": ("expert_weights_norm", False, bool),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "q_lora_rank": ("attention.q_lora_rank", 0),
    "kv_lora_rank": ("attention.kv_lora_rank",),
    "qk_rope_head_dim": ("rope.dimension_count",),
}
NONE_IF_0 = "sliding_window attn_logit_softcapping final_logit_softcapping q_lora_rank".split()


class GGUFModel(NamedTuple):
    """
    How files store a model that transformers calls `model_type`. `fields` names those of KEYS that it has;
    `read(fields, number, stored)` returns others, from those that are known and the file's tensors.
    """

    gguf_name: str
    model_type: str
    fields: str = ""
    read: Callable[[Fields, Number, Fields], Fields] | None = None
    rotates_part: bool = False  # of a head only, which the file says
    # Whether query and key projections are in the order in which llama.cpp rotates them, neighbouring rows
    # against each other; and what was added to the weights of norms.
    gguf_rotates_neighbours: bool = False
    gguf_added_to_norms: float = 0.0
    gguf_rope_keys: tuple[str, ...] = ()  # of rotations, which other models do not have

    def read_gguf_fields(self, raw: Fields, number: Number, stored: Fields) -> Fields:
        """The fields besides `raw`, those of all models."""
        has_bias, has_norms = raw["attention_bias"], "blk.0.attn_q_norm.weight" in stored
        found = {field: number(*KEYS[field]) for field in self.fields.split()}
        found |= {field: None for field in NONE_IF_0 if found.get(field) == 0}
        found |= {
            "pad_token_id": None,
            "use_bias": has_bias,
            "use_qkv_bias": has_bias,
            "use_qk_norm": has_norms,
            "qk_layernorm": has_norms,
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in stored,
        }
        if self.rotates_part:
            head_dim = raw["head_dim"]
            size = number("rope.dimension_count", head_dim)
            is_part = size in range(2, head_dim + 1, 2)
            check(is_part, f"rope.dimension_count must be an even number up to {head_dim}", size)
            found["partial_rotary_factor"] = size / head_dim
        return found if self.read is None else found | self.read(raw | found, number, stored)


def gemma(fields: Fields, number: Number, stored: Fields) -> Fields:
    """The largest models of Gemma 2 and 3, of 27b, are not told in any other way."""
    divisor = fields["head_dim"]
    if fields["num_hidden_layers"] in (46, 62):
        divisor = fields["hidden_size"] // max(fields["num_attention_heads"], 1)
    return {"query_pre_attn_scalar": divisor}


def phi3(fields: Fields, number: Number, stored: Fields) -> Fields:
    if "rope_factors_long.weight" not in stored:
        return {}
    trained = number("rope.scaling.original_context_length")
    scaling = {
        "rope_type": "longrope",
        "original_max_position_embeddings": trained,
        "attention_factor": number("rope.scaling.attn_factor", 1.0, float),
    }
    for kind in ("long", "short"):
        if (name := f"rope_factors_{kind}.weight") not in stored:
            raise ValueError(f"it has no tensor {name}")
        scaling[f"{kind}_factor"] = stored[name][:].tolist()
    return {"rope_scaling": scaling, "original_max_position_embeddings": trained}


def olmo(fields: Fields, number: Number, stored: Fields) -> Fields:
    """OLMo 2, or OLMo 3, some of whose layers have windows."""
    if not fields["sliding_window"]:
        return {}
    kinds = number("attention.sliding_window_pattern", None, list)
    theta = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    return {
        "model_type": "olmo3",
        "layer_types": [SLIDING if kind else FULL for kind in kinds],
        "rope_parameters": {FULL: theta | (fields["rope_scaling"] or {}), SLIDING: theta},
    }


def deepseek(fields: Fields, number: Number, stored: Fields) -> Fields:
    """DeepSeek-V2, or V3, which chooses experts by sigmoids."""
    rotated, scaling = fields["qk_rope_head_dim"], fields["rope_scaling"]
    if scale := 10 * number("rope.scaling.yarn_log_multiplier", 0.0, float):
        scaling = (scaling or {}) | {"mscale": scale, "mscale_all_dim": scale}
    # In newer files these are the lengths of what is cached, and those of heads have keys of their own.
    key_length = number("attention.key_length_mla", fields["head_dim"])
    value_length = number("attention.value_length_mla", number("attention.value_length"))
    return {
        "model_type": "deepseek_v3" if number("expert_gating_func", 1) == 2 else "deepseek_v2",
        "num_key_value_heads": fields["num_attention_heads"],
        "head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": value_length,
        "topk_method": "greedy" if fields["n_group"] == 1 else "group_limited_greedy",
        "rope_scaling": scaling,
    }


EXPERTS = "num_experts num_experts_per_tok"
# DeepSeek's: in groups, beside some that are for all tokens, behind layers without experts.
IN_GROUPS = (
    "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts first_k_dense_replace "
    "routed_scaling_factor norm_topk_prob n_group topk_group"
)
BY_TRANSFORMERS = (
    GGUFModel(
        "gemma2",
        "gemma2",
        "sliding_window attn_logit_softcapping final_logit_softcapping",
        gemma,
        gguf_added_to_norms=1.0,
    ),
    GGUFModel("phi3", "phi3", "sliding_window", phi3, rotates_part=True),
    GGUFModel(
        "granite",
        "granite",
        "attention_multiplier embedding_multiplier residual_multiplier logits_scaling",
        gguf_rotates_neighbours=True,
    ),
    GGUFModel("olmo2", "olmo2", "sliding_window", olmo),
    GGUFModel("glm4", "glm4", rotates_part=True),
    GGUFModel("command-r", "cohere", "logit_scale"),
    GGUFModel("cohere2", "cohere2", "sliding_window logit_scale"),
    GGUFModel("starcoder2", "starcoder2", "sliding_window"),
    GGUFModel("stablelm", "stablelm", rotates_part=True),
    GGUFModel("olmoe", "olmoe", EXPERTS),
    GGUFModel(
        "deepseek2",
        "deepseek_v2",
        f"{IN_GROUPS} q_lora_rank kv_lora_rank qk_rope_head_dim",
        deepseek,
        gguf_rope_keys=("scaling.yarn_log_multiplier",),
    ),
)
