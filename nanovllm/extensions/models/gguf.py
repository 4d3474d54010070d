"""How GGUF files store models that have no class here and are built by transformers.

A class says what `Decoder` says of models that have one, and `keys`, which have what transformers'
configuration has besides. What a file leaves out, transformers has as a default. Names of tensors are in the
tables of the gguf package.
"""

from collections.abc import Callable
from typing import Any

from nanovllm.extensions.models.config import Fields
from nanovllm.extensions.models.rope import FULL, SLIDING
from nanovllm.utils.validation import check

NONE_IF_0 = "sliding_window attn_logit_softcapping final_logit_softcapping q_lora_rank".split()
WINDOW = {"sliding_window": ("attention.sliding_window", 0)}
LOGIT_SCALE = {"logit_scale": ("logit_scale", None, float)}
EXPERTS = dict.fromkeys(("num_experts", "n_routed_experts"), ("expert_count",))
EXPERTS |= {"num_experts_per_tok": ("expert_used_count",)}
OWN_WIDTH = {"moe_intermediate_size": ("expert_feed_forward_length",)}
# DeepSeek's: in groups, beside some that are for all tokens, behind layers without experts.
IN_GROUPS = EXPERTS | OWN_WIDTH
IN_GROUPS |= {
    "n_shared_experts": ("expert_shared_count",),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0, float),
    "norm_topk_prob": ("expert_weights_norm", False, bool),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
}


class GGUFModel:
    keys: dict[str, tuple] = {}  # fields of a configuration by the arguments of `number`
    rotates_part = False  # of a head only, which the file says
    gguf_rotates_neighbours = False
    gguf_added_to_norms = 0.0
    gguf_rope_keys: tuple[str, ...] = ()

    @classmethod
    def read_gguf_fields(cls, raw: Fields, number: Callable[..., Any], stored: Fields) -> Fields:
        found = {field: number(*arguments) for field, arguments in cls.keys.items()}
        found |= {field: None for field in NONE_IF_0 if found.get(field) == 0}
        if cls.rotates_part:
            head_dim = raw["head_dim"]
            size = number("rope.dimension_count", head_dim)
            is_part = size in range(2, head_dim + 1, 2)
            check(is_part, f"rope.dimension_count must be an even number up to {head_dim}", size)
            found["partial_rotary_factor"] = size / head_dim
        has_bias, has_norms = raw["attention_bias"], "blk.0.attn_q_norm.weight" in stored
        return found | {
            "pad_token_id": None,
            "use_bias": has_bias,
            "use_qkv_bias": has_bias,
            "use_qk_norm": has_norms,
            "qk_layernorm": has_norms,
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in stored,
        }


class Gemma2(GGUFModel):
    model_type = gguf_name = "gemma2"
    gguf_added_to_norms = 1.0
    keys = WINDOW | {
        "attn_logit_softcapping": ("attn_logit_softcapping", 0.0, float),
        "final_logit_softcapping": ("final_logit_softcapping", 0.0, float),
    }

    @classmethod
    def read_gguf_fields(cls, raw: Fields, number: Callable[..., Any], stored: Fields) -> Fields:
        divisor = raw["head_dim"]
        if raw["num_hidden_layers"] == 46:  # the model of 27b, which is not told in any other way
            divisor = raw["hidden_size"] // max(raw["num_attention_heads"], 1)
        return super().read_gguf_fields(raw, number, stored) | {"query_pre_attn_scalar": divisor}


class Phi3(GGUFModel):
    model_type = gguf_name = "phi3"
    rotates_part = True
    keys = WINDOW

    @classmethod
    def read_gguf_fields(cls, raw: Fields, number: Callable[..., Any], stored: Fields) -> Fields:
        found = super().read_gguf_fields(raw, number, stored)
        if "rope_factors_long.weight" in stored:
            trained = number("rope.scaling.original_context_length")
            scaling: Fields = {"rope_type": "longrope", "original_max_position_embeddings": trained}
            scaling["attention_factor"] = number("rope.scaling.attn_factor", 1.0, float)
            for kind in ("long", "short"):
                if (name := f"rope_factors_{kind}.weight") not in stored:
                    raise ValueError(f"it has no tensor {name}")
                scaling[f"{kind}_factor"] = stored[name][:].tolist()
            found |= {"rope_scaling": scaling, "original_max_position_embeddings": trained}
        return found


class Granite(GGUFModel):
    model_type = gguf_name = "granite"
    gguf_rotates_neighbours = True
    keys = {
        "attention_multiplier": ("attention.scale", None, float),
        "embedding_multiplier": ("embedding_scale", 1.0, float),
        "residual_multiplier": ("residual_scale", 1.0, float),
        "logits_scaling": ("logit_scale", 1.0, float),
    }


class Olmo2(GGUFModel):
    """And OLMo 3, some of whose layers have windows."""

    model_type = gguf_name = "olmo2"
    keys = WINDOW

    @classmethod
    def read_gguf_fields(cls, raw: Fields, number: Callable[..., Any], stored: Fields) -> Fields:
        found = super().read_gguf_fields(raw, number, stored)
        if found["sliding_window"]:
            kinds = number("attention.sliding_window_pattern", None, list)
            found |= {"model_type": "olmo3", "layer_types": [SLIDING if kind else FULL for kind in kinds]}
            theta = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
            found["rope_parameters"] = {FULL: theta | (raw["rope_scaling"] or {}), SLIDING: theta}
        return found


class SmolLM3(GGUFModel):
    model_type = gguf_name = "smollm3"
    gguf_rotates_neighbours = True


class Glm4(GGUFModel):
    model_type = gguf_name = "glm4"
    rotates_part = True


class Cohere(GGUFModel):
    model_type, gguf_name = "cohere", "command-r"
    keys = LOGIT_SCALE


class Cohere2(GGUFModel):
    model_type = gguf_name = "cohere2"
    keys = WINDOW | LOGIT_SCALE


class Starcoder2(GGUFModel):
    model_type = gguf_name = "starcoder2"
    keys = WINDOW


class StableLM(GGUFModel):
    model_type = gguf_name = "stablelm"
    rotates_part = True


class Qwen2Moe(GGUFModel):
    model_type, gguf_name = "qwen2_moe", "qwen2moe"
    keys = EXPERTS | OWN_WIDTH
    keys |= {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length",)}


class Olmoe(GGUFModel):
    model_type = gguf_name = "olmoe"
    keys = EXPERTS


class Glm4Moe(GGUFModel):
    model_type, gguf_name = "glm4_moe", "glm4moe"
    rotates_part = True
    keys = IN_GROUPS


class Deepseek2(GGUFModel):
    """DeepSeek-V2, and V3, which chooses experts by sigmoids."""

    model_type, gguf_name = "deepseek_v2", "deepseek2"
    keys = IN_GROUPS | {
        "q_lora_rank": ("attention.q_lora_rank", 0),
        "kv_lora_rank": ("attention.kv_lora_rank",),
        "qk_rope_head_dim": ("rope.dimension_count",),
    }
    gguf_rope_keys = ("scaling.yarn_log_multiplier",)

    @classmethod
    def read_gguf_fields(cls, raw: Fields, number: Callable[..., Any], stored: Fields) -> Fields:
        found = super().read_gguf_fields(raw, number, stored)
        # Older files have the lengths of heads, newer ones those of what is cached in place of them.
        key_length, value_length = (
            number(f"attention.{kind}_length_mla", number(f"attention.{kind}_length"))
            for kind in ("key", "value")
        )
        found |= {
            "num_key_value_heads": raw["num_attention_heads"],
            "head_dim": found["qk_rope_head_dim"],
            "qk_nope_head_dim": key_length - found["qk_rope_head_dim"],
            "v_head_dim": value_length,
            "topk_method": "greedy" if found["n_group"] == 1 else "group_limited_greedy",
        }
        if number("expert_gating_func", 1) == 2:
            found["model_type"] = "deepseek_v3"
        if scale := 10 * number("rope.scaling.yarn_log_multiplier", 0.0, float):
            found["rope_scaling"] = (raw["rope_scaling"] or {}) | dict(mscale=scale, mscale_all_dim=scale)
        return found


BY_TRANSFORMERS = (
    Gemma2,
    Phi3,
    Granite,
    Olmo2,
    SmolLM3,
    Glm4,
    Cohere,
    Cohere2,
    Starcoder2,
    StableLM,
    Qwen2Moe,
    Olmoe,
    Glm4Moe,
    Deepseek2,
)
