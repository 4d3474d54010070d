"""The fields of a checkpoint's config.json, checked, with transformers' defaults for what is left out."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# No real model comes near these limits; what exceeds them would be noticed when memory has run out.
COUNTS = "num_attention_heads num_key_value_heads".split()
SIZES = "hidden_size intermediate_size vocab_size max_position_embeddings head_dim".split()
SIZE_LIMITS = {"num_hidden_layers": 2**10, **dict.fromkeys(COUNTS, 2**12), **dict.fromkeys(SIZES, 2**24)}
CONFIG_DEFAULTS = {
    "architectures": [],
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {},
    "rope_scaling": {},
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def build_config(source: str | Path, raw: dict[str, Any]) -> SimpleNamespace:
    """
    What a config.json holds, as attributes, with transformers' defaults for fields it may leave out. Raises
    ValueError. Not transformers' own class: importing those takes longer than loading a small model.
    """
    from nanovllm.models import get_model_class

    config = SimpleNamespace(**{**CONFIG_DEFAULTS, **{k: v for k, v in raw.items() if v is not None}})
    try:
        get_model_class(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    dtype = raw.get("dtype") or raw.get("torch_dtype")  # the second is the older spelling
    config.dtype = str(dtype).removeprefix("torch.") if dtype else None
    for field, limit in SIZE_LIMITS.items():
        value = getattr(config, field, None)
        if value is None and field == "num_key_value_heads":
            value = config.num_attention_heads
        if value is None and field == "head_dim":
            qwen3 = "Qwen3ForCausalLM" in config.architectures
            value = 128 if qwen3 else config.hidden_size // config.num_attention_heads
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{source}: {field} must be an integer from 1 to {limit}, got {value!r}")
        setattr(config, field, value)
    kinds = {field: type(default) for field, default in CONFIG_DEFAULTS.items()}
    for field, kind in {**kinds, "rms_norm_eps": (int, float), "rope_theta": (int, float)}.items():
        value = getattr(config, field)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{source}: {field} cannot be {value!r:.100}")
    if not 0 <= config.rms_norm_eps <= 1:
        raise ValueError(f"{source}: rms_norm_eps cannot be {config.rms_norm_eps!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{source}: num_key_value_heads must divide num_attention_heads, which is "
            f"{config.num_attention_heads}, got {config.num_key_value_heads}"
        )
    _check_rotation(source, config)
    return config


def _check_rotation(source: str | Path, config: SimpleNamespace) -> None:
    """Raise ValueError unless the rotary settings make a table of numbers, which a table of two shows."""
    from nanovllm.layers.rotary_embedding import context_limit, get_rope, rope_parameters

    settings = rope_parameters(config)
    try:
        if not all(math.isfinite(value) for value in settings.values() if isinstance(value, float)):
            raise ValueError("they are not all finite")
        if config.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {config.head_dim}")
        if not get_rope(config.head_dim, 2, settings).cos_sin_cache.isfinite().all():
            raise ValueError("they give angles that are no numbers")
        if context_limit(config) > (most := SIZE_LIMITS["max_position_embeddings"]):
            raise ValueError(f"they extend the context beyond {most} positions")
    except Exception as error:  # whatever values of any kind and size provoke in there
        raise ValueError(f"{source}: rotary settings {settings!r:.300}: {error}") from error


def merge_eos_ids(source: str, *values: Any) -> tuple[int, ...]:
    """All token ids in `values`, each of which is an id, a list of ids or None."""
    token_ids = [
        i for value in values for i in (value if isinstance(value, list) else [value]) if i is not None
    ]
    for token_id in token_ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(
                f"{source}: eos_token_id must be one token id or a list of them, got {token_id!r}"
            )
    return tuple(dict.fromkeys(token_ids))
