"""What the engine knows of a model: the fields of its config.json, checked and in one spelling, with the
defaults of transformers.

Knows no layers. What passes here can be built: every size is possible and every setting makes finite numbers.
Not transformers' own class, since importing that takes longer than loading a small model.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nanovllm.utils.validation import shown

# The architectures that are known, and which of their defaults are not those of all others.
ARCHITECTURES = {"LlamaForCausalLM": {}, "Qwen2ForCausalLM": {}, "Qwen3ForCausalLM": {"head_dim": 128}}
DEFAULTS = {
    "model_type": "",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
SIZES = "num_hidden_layers num_attention_heads num_key_value_heads hidden_size intermediate_size vocab_size"
SIZES = [*SIZES.split(), "max_position_embeddings", "head_dim"]  # the last one's default is made of others
MAX_LAYERS, MAX_SIZE = 2**10, 2**24  # no real model comes near; without a limit, memory would run out first
# The kinds of rotary scaling, and which settings each of them needs.
ROPE_TYPES = {
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
    "yarn": ["factor"],
    "frequency_factors": ["factors"],
}
ROPE_NUMBERS = "rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast"
ROPE_NUMBERS = [*ROPE_NUMBERS.split(), "beta_slow", "attention_factor", "mscale", "mscale_all_dim"]


@dataclass(frozen=True)
class ModelConfig:
    """
    Fields have the names of config.json. `architectures` are those that are known, `rope_parameters` are all
    rotary settings, whichever way the file spells them, `dtype` is None if the file names none, and `raw` is
    the file itself.
    """

    model_type: str
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
    mlp_bias: bool
    tie_word_embeddings: bool
    hidden_act: str
    dtype: str | None
    rope_parameters: dict[str, Any]
    raw: dict[str, Any] = field(repr=False)
    context_limit: int  # positions that the checkpoint is for
    max_model_len: int  # positions that the engine uses: the length of the table of rotations

    @classmethod
    def from_dict(cls, source: str | Path, raw: dict[str, Any]) -> "ModelConfig":
        """Raises ValueError naming the source and what is wrong or not supported."""
        try:
            values = _read({name: value for name, value in raw.items() if value is not None})
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        values.update(raw=raw, max_model_len=values["context_limit"])
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def _read(given: dict[str, Any]) -> dict[str, Any]:
    architectures = _read_architectures(given)  # first, since the others' files have other fields
    values = DEFAULTS | ARCHITECTURES[architectures[0]] | given
    for name, default in DEFAULTS.items():
        if not isinstance(default, float) and type(values[name]) is not type(default):
            raise ValueError(f"{name} cannot be {shown(values[name])}")
    _check_number("rms_norm_eps", values["rms_norm_eps"], 0, 1)
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    for name in SIZES:
        if name == "head_dim":
            values.setdefault(name, values["hidden_size"] // values["num_attention_heads"])
        value, limit = values.get(name), MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{name} must be an integer from 1 to {limit}, got {shown(value)}")
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads must divide num_attention_heads, which is {heads}, got {kv_heads}"
        )
    if values["head_dim"] % 2:
        raise ValueError(f"head_dim must be even, got {values['head_dim']}")
    rope_parameters = _read_rope_parameters(values)
    limit = _context_limit(rope_parameters, values["max_position_embeddings"])
    dtype = given.get("dtype") or given.get("torch_dtype")  # the second is the older spelling
    dtype = str(dtype).removeprefix("torch.") if dtype else None
    return values | dict(
        architectures=architectures, dtype=dtype, rope_parameters=rope_parameters, context_limit=limit
    )


def _read_architectures(given: dict[str, Any]) -> list[str]:
    """Those that are known. Raises ValueError if there are none, or if one does what we do not."""
    names = given.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = [str(names)]
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ValueError(
            f"architecture {', '.join(names) or 'none'} is not known; known ones: {', '.join(ARCHITECTURES)}"
        )
    if given.get("quantization_config"):
        raise ValueError("quantized safetensors checkpoints (quantization_config) are not supported")
    if given.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {shown(given['hidden_act'])}")
    if given.get("use_sliding_window"):
        raise ValueError("checkpoints with use_sliding_window=true are not supported")
    layer_types = given.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ValueError(f"layer_types must all be 'full_attention', got {shown(layer_types)}")
    return known


def _read_rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """All rotary settings, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    settings = {
        "rope_theta": values["rope_theta"],
        "original_max_position_embeddings": values["max_position_embeddings"],
    }
    for spelling in ("rope_scaling", "rope_parameters"):
        found = values.get(spelling, {})
        if not isinstance(found, dict):
            raise ValueError(f"{spelling} cannot be {shown(found)}")
        settings.update({name: value for name, value in found.items() if value is not None})
    if nested := [name for name, value in settings.items() if isinstance(value, dict)]:
        raise ValueError(f"rotary settings for one kind of layer ({nested[0]!r}) are not supported")
    rope_type = settings.setdefault("rope_type", settings.get("type", "default"))
    if rope_type not in [*ROPE_TYPES]:  # which may be no text
        raise ValueError(
            f"rope type {shown(rope_type)} is not supported; known types: {', '.join(ROPE_TYPES)}"
        )
    if missing := [name for name in ROPE_TYPES[rope_type] if name not in settings]:
        raise ValueError(f"rope type {rope_type!r} needs {missing[0]!r}, which the config does not give")
    _check_rope_parameters(settings, values["head_dim"])
    return settings


def _check_rope_parameters(settings: dict[str, Any], head_dim: int) -> None:
    """Raise ValueError unless every angle will be a finite number, which these ranges ensure."""
    numbers = [(name, settings[name]) for name in ROPE_NUMBERS if name in settings]
    if settings["rope_type"] == "frequency_factors":
        factors = settings["factors"]
        if not isinstance(factors, list) or len(factors) != head_dim // 2:
            raise ValueError(f"rotary factors must be {head_dim // 2} numbers, got {shown(factors)}")
        numbers += [("each of the rotary factors", factor) for factor in factors]
    for name, value in numbers:
        _check_number(name, value, 2 if name == "rope_theta" else 1e-6, 1e15)
    if settings["rope_type"] == "llama3" and settings["low_freq_factor"] >= settings["high_freq_factor"]:
        raise ValueError(f"high_freq_factor must be more than low_freq_factor, got {shown(settings)}")
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1, got {shown(settings['partial_rotary_factor'])}")


def _check_number(name: str, value: Any, least: float, greatest: float) -> None:
    if type(value) not in (int, float) or not least <= value <= greatest:  # nor is NaN
        raise ValueError(f"{name} must be a number from {least} to {greatest}, got {shown(value)}")


def _context_limit(rope_parameters: dict[str, Any], trained: int) -> int:
    """
    How many positions the checkpoint is for. Scaling extends what it was trained on by its factor, which
    `max_position_embeddings` counts already in some checkpoints (Llama 3.1's) and in others not (Qwen3's).
    """
    if rope_parameters["rope_type"] not in ("linear", "llama3", "yarn"):
        return trained
    limit = int(max(trained, rope_parameters["factor"] * rope_parameters["original_max_position_embeddings"]))
    if limit > MAX_SIZE:
        raise ValueError(f"rotary settings extend the context beyond {MAX_SIZE} positions, to {limit}")
    return limit


def merge_eos_ids(source: str, *values: Any) -> tuple[int, ...]:
    """All token ids in `values`, each of which is an id, a list of ids or None."""
    lists = [value if isinstance(value, list) else [value] for value in values]
    token_ids = [token_id for some in lists for token_id in some if token_id is not None]
    for token_id in token_ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(
                f"{source}: eos_token_id must be one token id or a list of them, got {shown(token_id)}"
            )
    return tuple(dict.fromkeys(token_ids))
