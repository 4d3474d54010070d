"""What the engine knows of a model: the fields of its config.json, checked, with transformers' defaults.

Knows no layers, and no model but Qwen3: what others have besides is in a subclass. What passes here can be
built: every size is possible and every setting makes finite numbers. Not transformers' own class, since
importing that takes longer than loading a small model.
"""

from dataclasses import dataclass, fields
from typing import Any

from nanovllm.utils.validation import check, check_bool, integer, number, shown

ARCHITECTURE = "Qwen3ForCausalLM"
DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False}
# Settings that may have this value only.
FIXED = {"hidden_act": "silu", "use_sliding_window": False, "rope_scaling": None, "quantization_config": None}
# No real model comes near; without a limit, memory would run out first.
MAX_LAYERS, MAX_SIZE = 2**10, 2**24
check_size = integer(1, MAX_SIZE)
CHECKS = {
    "rms_norm_eps": number(0, 1),
    "attention_bias": check_bool,
    "tie_word_embeddings": check_bool,
    "num_hidden_layers": integer(1, MAX_LAYERS),
    "hidden_size": check_size,
    "intermediate_size": check_size,
    "vocab_size": check_size,
    "max_position_embeddings": check_size,
    "num_attention_heads": check_size,
}


@dataclass(frozen=True)
class ModelConfig:
    """
    Fields have the names of config.json. `rope_parameters` has `rope_theta`, and may have the frequencies
    themselves, see `get_rope`. `dtype` is None if the file names none.
    """

    architectures: list[str]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    dtype: str | None
    rope_parameters: dict[str, Any]
    context_limit: int  # positions that the checkpoint is for
    max_model_len: int  # positions that the engine uses: the length of the table of rotations

    tokens_in_reach = 0  # to how many tokens a token attends in any layer; 0: to all

    @classmethod
    def from_dict(cls, source: str, raw: dict[str, Any]) -> "ModelConfig":
        """Raises ValueError naming the source and what is wrong or not supported."""
        try:
            return cls.from_values(read_qwen3(raw))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "ModelConfig":
        """From checked fields, among others."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @property
    def divided_sizes(self) -> dict[str, int]:
        """Which the number of ranks must divide."""
        return {
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": self.intermediate_size,
        }

    def usual_dtype(self, device: str) -> str:
        """Of weights and activations, if the checkpoint names none."""
        return "float32" if device == "cpu" else "bfloat16"


def read_qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ModelConfig, among others."""
    given = {name: value for name, value in raw.items() if value is not None}
    names = given.get("architectures")
    check(names == [ARCHITECTURE], f"architectures must be {[ARCHITECTURE]}", names)
    values = read_sizes(DEFAULTS | given)
    full = ["full_attention"] * values["num_hidden_layers"]
    for name, value in {**FIXED, "layer_types": full}.items():
        if given.get(name, value) != value:
            raise ValueError(f"{name} = {shown(given[name])} is not supported")
    rope = given.get("rope_parameters", {"rope_theta": given.get("rope_theta", 10000.0)})
    is_plain = isinstance(rope, dict) and rope.get("rope_type", "default") == "default"
    check(is_plain, "rope_parameters must be of rope_type 'default'", rope)
    number(2, 1e15)(rope.get("rope_theta"), "rope_theta")
    limit = values["max_position_embeddings"]
    return values | {
        "rope_parameters": {"rope_theta": rope["rope_theta"]},
        "context_limit": limit,
        "max_model_len": limit,
    }


def read_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """Check sizes and flags and add those that are missing. Raises ValueError naming one that is wrong."""
    for name, check_value in CHECKS.items():
        check_value(values.get(name), name)
    heads = values["num_attention_heads"]
    kv_heads = values.setdefault("num_key_value_heads", heads)
    head_dim = values.setdefault("head_dim", values["hidden_size"] // heads)
    check_size(kv_heads, "num_key_value_heads")
    check_size(head_dim, "head_dim")
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
    check(head_dim % 2 == 0, "head_dim must be even", head_dim)
    dtype = values.get("dtype") or values.get("torch_dtype")  # the second is the older spelling
    values["dtype"] = str(dtype).removeprefix("torch.") if dtype else None
    return values
