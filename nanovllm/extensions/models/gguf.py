"""How GGUF files store models that have no class here and are built by transformers.

A class says what `Decoder` says of models that have one, and `keys`, which have what transformers'
configuration has besides. What a file leaves out, transformers has as a default. Names of tensors are in the
tables of the gguf package.
"""

from collections.abc import Callable
from typing import Any

from nanovllm.extensions.models.config import Fields
from nanovllm.extensions.models.rope import FULL, SLIDING

# 0 is none.
WINDOW = {"sliding_window": ("attention.sliding_window", 0)}
LOGIT_SCALE = {"logit_scale": ("logit_scale", None, float)}


class GGUFModel:
    keys: dict[str, tuple] = {}  # fields of a configuration by the arguments of `number`
    rotates_part = False  # of a head only, which the file says
    gguf_rotates_neighbours = False
    gguf_added_to_norms = 0.0

    @classmethod
    def read_gguf_fields(cls, raw: Fields, number: Callable[..., Any], stored: Fields) -> Fields:
        found = {field: number(*arguments) or None for field, arguments in cls.keys.items()}
        if cls.rotates_part:
            head_dim = raw["head_dim"]
            found["partial_rotary_factor"] = number("rope.dimension_count", head_dim) / max(head_dim, 1)
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
)
