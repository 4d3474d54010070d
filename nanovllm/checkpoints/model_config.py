"""What the engine knows of a model: the fields of its config.json, checked and in one spelling, with the
defaults of transformers.

Knows no layers. What passes here can be built: every size is possible and every setting makes finite numbers.
Not transformers' own class, since importing that takes longer than loading a small model.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nanovllm.checkpoints.transformers_config import FULL, SLIDING, read_transformers_config
from nanovllm.utils.validation import check, check_bool, shown

QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
EXPERTS = {"num_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}
# The architectures that are known, and which of their defaults are not those of all others.
ARCHITECTURES: dict[str, dict[str, Any]] = {"LlamaForCausalLM": {}}
ARCHITECTURES["MistralForCausalLM"] = {"sliding_window": 4096}
ARCHITECTURES["Qwen2ForCausalLM"] = QWEN_WINDOW | {"max_window_layers": 28}
ARCHITECTURES["Qwen3ForCausalLM"] = ARCHITECTURES["Qwen2ForCausalLM"] | {"head_dim": 128}
ARCHITECTURES["Qwen3MoeForCausalLM"] = {
    **QWEN_WINDOW,
    **EXPERTS,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
ARCHITECTURES["Gemma3ForCausalLM"] = {
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
ARCHITECTURES["GptOssForCausalLM"] = {
    **EXPERTS,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": None,  # intermediate_size
    "norm_topk_prob": True,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
    },
}  # fmt: skip
# Settings that may have this value only.
SUPPORTED = {"partial_rotary_factor": 1.0, "final_logit_softcapping": None, "attn_logit_softcapping": None}
SUPPORTED |= {"use_bidirectional_attention": False, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
FLAGS = ["attention_bias", "mlp_bias", "tie_word_embeddings"]
SIZES = ["hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "num_attention_heads"]
# No real model comes near; without a limit, memory would run out first.
MAX_LAYERS, MAX_EXPERTS, MAX_SIZE = 2**10, 2**12, 2**24
# The kinds of rotary scaling, and which numbers each of them needs.
ROPE_TYPES = {"default": [], "frequency_factors": [], "linear": ["factor"], "yarn": ["factor"]}
ROPE_TYPES["llama3"] = ["factor", "low_freq_factor", "high_freq_factor"]
ROPE_NUMBERS = "rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast"
ROPE_NUMBERS = [*ROPE_NUMBERS.split(), "beta_slow", "attention_factor", "mscale", "mscale_all_dim"]


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that takes the place of some layers' MLP. Fields as in config.json."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: list[int]

    def replaces_mlp(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True)
class ModelConfig:
    """
    Fields have the names of config.json. `architectures` are those whose classes here are to be used; without
    one transformers builds the model from `raw`, the file itself, and of all others only sizes count.
    `rope_parameters` are all rotary settings, whichever way the file spells them, of layers without a window,
    and `local_rope_parameters` those of the others. `windows` has of each layer to how many tokens it attends
    (0: to all), and `dtype` is None if the file names none.
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
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str | None
    rope_parameters: dict[str, Any]
    local_rope_parameters: dict[str, Any]
    windows: tuple[int, ...]
    query_pre_attn_scalar: float  # attention scores are divided by its root
    experts: ExpertsConfig | None  # None if each layer has an MLP
    quantization_config: dict[str, Any] | None  # as the file has it; None if weights are not quantised
    raw: dict[str, Any] = field(repr=False)
    context_limit: int  # positions that the checkpoint is for
    max_model_len: int  # positions that the engine uses: the length of the table of rotations

    @classmethod
    def from_dict(cls, source: str | Path, raw: dict[str, Any], model_impl: str = "auto") -> "ModelConfig":
        """
        `model_impl` as the engine's option. Raises ValueError naming the source and what is wrong or not
        supported.
        """
        try:
            values = _read(raw, model_impl) | {"raw": raw}
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def window(self, layer: int) -> int:
        """To how many tokens a layer attends; 0 if these are all that there can be."""
        window = self.windows[layer]
        return window if window < self.max_model_len else 0

    @property
    def tokens_in_reach(self) -> int:
        """To how many tokens a token attends in any layer; 0: to all."""
        windows = [*map(self.window, range(self.num_hidden_layers))]
        return max(windows) if all(windows) else 0


def _read(raw: dict[str, Any], model_impl: str) -> dict[str, Any]:
    """The fields of a ModelConfig, among others."""
    given = {name: value for name, value in raw.items() if value is not None}
    # First, since the others' files have other fields.
    architectures = _read_architectures(given) if model_impl != "transformers" else []
    if not architectures:
        if model_impl == "native":
            known, name = ", ".join(ARCHITECTURES), shown(given.get("architectures"))
            raise ValueError(f"model_impl='native' has no class for architectures {name}, only for {known}")
        kept = ("dtype", "torch_dtype", "quantization_config")
        try:
            given = read_transformers_config(raw) | {name: given[name] for name in kept if name in given}
        except ValueError as error:
            raise ValueError(f"{error}; known without transformers: {', '.join(ARCHITECTURES)}") from None
    own = ARCHITECTURES[architectures[0]] if architectures else {}
    if "rope_parameters" in given:  # takes the place of all settings
        own = {name: value for name, value in own.items() if name != "rope_scaling"}
    values = {"rms_norm_eps": 1e-6} | dict.fromkeys(FLAGS, False) | own | given
    _check_number("rms_norm_eps", values["rms_norm_eps"], 0, 1)
    for name in FLAGS:
        check_bool(values[name], name)
    _check_size("num_hidden_layers", values.get("num_hidden_layers"), MAX_LAYERS)
    for name in SIZES:
        _check_size(name, values.get(name))
    heads = values["num_attention_heads"]
    kv_heads = values.setdefault("num_key_value_heads", heads)
    head_dim = values.setdefault("head_dim", values["hidden_size"] // heads)
    _check_size("num_key_value_heads", kv_heads)
    _check_size("head_dim", head_dim)
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
    check(head_dim % 2 == 0, "head_dim must be even", head_dim)
    _check_number("query_pre_attn_scalar", values.setdefault("query_pre_attn_scalar", head_dim), 1e-6, 1e15)
    rope_parameters, local = (_read_rope_parameters(values, kind) for kind in (FULL, SLIDING))
    activation = "hidden_activation" if "hidden_activation" in given else "hidden_act"
    for name, value in (SUPPORTED | {activation: own.get("hidden_act", "silu")}).items():
        for settings in (given, rope_parameters):
            if settings.get(name, value) != value:
                raise ValueError(f"{name} = {shown(settings[name])} is not supported")
    quantization_config = given.get("quantization_config") or None
    if not isinstance(quantization_config, dict | type(None)):
        raise ValueError(f"quantization_config cannot be {shown(quantization_config)}")
    limit = _context_limit(rope_parameters, values["max_position_embeddings"])
    dtype = given.get("dtype") or given.get("torch_dtype")  # the second is the older spelling
    dtype = str(dtype).removeprefix("torch.") if dtype else None
    windows = _read_windows(values, raw, own) if architectures else (0,) * values["num_hidden_layers"]
    values.update(architectures=architectures, rope_parameters=rope_parameters, local_rope_parameters=local)
    values.update(windows=windows, dtype=dtype, quantization_config=quantization_config)
    values["experts"] = _read_experts(values) if "num_experts" in own else None
    return values | {"context_limit": limit, "max_model_len": limit}


def _read_architectures(given: dict[str, Any]) -> list[str]:
    """Those that have a class here."""
    names = given.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        names = [str(names)]
    return [name for name in names if name in ARCHITECTURES]


def _read_windows(values: dict[str, Any], raw: dict[str, Any], own: dict[str, Any]) -> tuple[int, ...]:
    """Of each layer, from `layer_types`, or from what takes its place in this architecture."""
    num_layers, is_used = values["num_hidden_layers"], values.get("use_sliding_window", True)
    check_bool(is_used, "use_sliding_window")
    window = raw.get("sliding_window", own["sliding_window"]) if "sliding_window" in own else None
    if not is_used or window is None:
        window, kinds, allowed = 0, [FULL] * num_layers, [FULL]
    else:
        _check_size("sliding_window", window)
        first = values["max_window_layers"] if "max_window_layers" in own else 0
        every = values["sliding_window_pattern"] if "sliding_window_pattern" in own else 0
        _check_number("max_window_layers", first, 0, MAX_SIZE)
        _check_number("sliding_window_pattern", every, 0, MAX_SIZE)
        has_window = [i >= first and not (every and (i + 1) % every == 0) for i in range(num_layers)]
        kinds, allowed = [SLIDING if each else FULL for each in has_window], [FULL, SLIDING]
    kinds = values.get("layer_types", kinds)
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(kind not in allowed for kind in kinds):
        expected = " or ".join(map(repr, allowed))
        raise ValueError(f"layer_types must be {expected} for each layer, got {shown(kinds)}")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _read_experts(values: dict[str, Any]) -> ExpertsConfig:
    values["num_experts"] = values.get("num_local_experts", values["num_experts"])  # the newer spelling
    if values["moe_intermediate_size"] is None:
        values["moe_intermediate_size"] = values["intermediate_size"]
    experts = ExpertsConfig(**{field.name: values[field.name] for field in fields(ExpertsConfig)})
    _check_size("num_experts", experts.num_experts, MAX_EXPERTS)
    _check_size("num_experts_per_tok", experts.num_experts_per_tok, experts.num_experts)
    _check_size("moe_intermediate_size", experts.moe_intermediate_size)
    _check_size("decoder_sparse_step", experts.decoder_sparse_step)
    check_bool(experts.norm_topk_prob, "norm_topk_prob")
    layers = experts.mlp_only_layers
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"mlp_only_layers must be a list of integers, got {shown(layers)}")
    return experts


def _read_rope_parameters(values: dict[str, Any], layer_type: str) -> dict[str, Any]:
    """
    All rotary settings of one kind of layer, from `rope_parameters` (which may have them by kind) or
    `rope_theta` and `rope_scaling`, beside which `rope_local_base_freq` is for layers with a window. Raises
    ValueError unless every angle will be a finite number, which the ranges ensure.
    """
    settings = {"original_max_position_embeddings": values["max_position_embeddings"]}
    has_kinds = "rope_local_base_freq" in values
    is_local = has_kinds and layer_type == SLIDING
    settings["rope_theta"] = values["rope_local_base_freq"] if is_local else values.get("rope_theta", 10000.0)
    for spelling in ("rope_scaling", "rope_parameters"):
        found = values.get(spelling, {})
        if not isinstance(found, dict):
            raise ValueError(f"{spelling} cannot be {shown(found)}")
        if has_kinds and any(isinstance(value, dict) for value in found.values()):
            found = found.get(layer_type) or {}
            if not isinstance(found, dict):
                raise ValueError(f"{spelling} of {layer_type!r} cannot be {shown(found)}")
        elif is_local:
            continue
        settings.update({name: value for name, value in found.items() if value is not None})
    if nested := [name for name, value in settings.items() if isinstance(value, dict)]:
        raise ValueError(f"rotary settings for one kind of layer ({nested[0]!r}) are not supported")
    kind = settings.setdefault("rope_type", settings.get("type", "default"))
    if kind not in [*ROPE_TYPES]:  # which may be no text
        raise ValueError(f"rope type {shown(kind)} is not supported; known types: {', '.join(ROPE_TYPES)}")
    for name in ROPE_NUMBERS:
        if name in settings or name in ROPE_TYPES[kind]:
            _check_number(name, settings.get(name), 2 if name == "rope_theta" else 1e-6, 1e15)
    if kind == "frequency_factors":
        factors, count = settings.get("factors"), values["head_dim"] // 2
        if not isinstance(factors, list) or len(factors) != count:
            raise ValueError(f"rotary factors must be {count} numbers, got {shown(factors)}")
        for factor in factors:
            _check_number("each of the rotary factors", factor, 1e-6, 1e15)
    if kind == "llama3" and settings["low_freq_factor"] >= settings["high_freq_factor"]:
        raise ValueError(f"high_freq_factor must be more than low_freq_factor, got {shown(settings)}")
    return settings


def _context_limit(rope_parameters: dict[str, Any], trained: int) -> int:
    """
    How many positions the checkpoint is for. Scaling extends what it was trained on by its factor, which
    `max_position_embeddings` counts already in some checkpoints (Llama 3.1's) and in others not (Qwen3's).
    """
    if "factor" not in ROPE_TYPES[rope_parameters["rope_type"]]:
        return trained
    limit = int(max(trained, rope_parameters["factor"] * rope_parameters["original_max_position_embeddings"]))
    _check_size("the context, extended by the rotary factor,", limit)
    return limit


def _check_size(name: str, value: Any, limit: int = MAX_SIZE) -> None:
    check(type(value) is int and 1 <= value <= limit, f"{name} must be an integer from 1 to {limit}", value)


def _check_number(name: str, value: Any, least: float, greatest: float) -> None:
    if type(value) not in (int, float) or not least <= value <= greatest:  # nor is NaN
        raise ValueError(f"{name} must be a number from {least} to {greatest}, got {shown(value)}")
