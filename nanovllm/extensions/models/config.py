"""The configuration of a decoder that has more than Qwen3: windows, experts, other rotations.

One spelling for what files of many models say; what a file leaves out is in the model's `Facts`.
"""

from dataclasses import dataclass, field, fields, replace

import torch

from nanovllm.checkpoints.model_config import (
    MAX_SIZE,
    ModelConfig,
    check_number,
    check_size,
    read_dtype,
    read_sizes,
)
from nanovllm.extensions.models.facts import Fields
from nanovllm.extensions.models.rope import FULL, SLIDING, context_limit, read_rope_parameters
from nanovllm.utils.validation import check, check_bool, shown

MAX_EXPERTS = 2**12
DEFAULTS = {"rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
# Before which layer there is no window, and every which layer has none.
WINDOW_PATTERN = "max_window_layers", "sliding_window_pattern"
# Settings that may have this value only.
SUPPORTED = {"partial_rotary_factor": 1.0, "final_logit_softcapping": None, "attn_logit_softcapping": None}
SUPPORTED |= {"use_bidirectional_attention": False, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}


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
class DecoderConfig(ModelConfig):
    """
    `architectures` are those whose classes here are to be used; without one transformers builds the model
    from `raw`, the file itself, and of all other fields only sizes count. `rope_parameters` are all rotary
    settings, whichever way the file spells them, of layers without a window, and `local_rope_parameters`
    those of the others. `windows` has of each layer to how many tokens it attends (0: to all).
    """

    mlp_bias: bool
    local_rope_parameters: Fields
    windows: tuple[int, ...]
    query_pre_attn_scalar: float  # attention scores are divided by its root
    experts: ExpertsConfig | None  # None if each layer has an MLP
    quantization_config: Fields | None  # as the file has it; None if weights are not quantised
    raw: Fields = field(repr=False)

    def window(self, layer: int) -> int:
        """To how many tokens a layer attends; 0 if these are all that there can be."""
        window = self.windows[layer]
        return window if window < self.max_model_len else 0

    @property
    def tokens_in_reach(self) -> int:
        windows = [self.window(layer) for layer in range(self.num_hidden_layers)]
        return max(windows) if all(windows) else 0

    @property
    def divided_sizes(self) -> dict[str, int]:
        own = {} if self.experts is None else {"moe_intermediate_size": self.experts.moe_intermediate_size}
        return super().divided_sizes | own

    def usual_dtype(self, device: str) -> str:
        """Weights of 4 to 6 bits stay packed on a CPU that multiplies bfloat16 itself."""
        bits = (self.quantization_config or {}).get("bits_per_weight", 0)
        stays_packed = 4 <= bits < 7 and torch.cpu._is_avx512_bf16_supported()
        return "bfloat16" if stays_packed else super().usual_dtype(device)

    def shortened(self) -> "DecoderConfig":
        """A model of two layers that launches every kernel that this one does."""
        windows = (*dict.fromkeys(self.windows), *self.windows)[:2]  # unlike ones, if there are
        return replace(self, num_hidden_layers=len(windows), windows=windows)


def read_decoder(raw: Fields, architectures: list[str], own: Fields, given: Fields) -> DecoderConfig:
    """
    From the fields that a file has, `given`, and the defaults of its model. `architectures` is empty for one
    without a class here. Raises ValueError naming what is wrong or not supported.
    """
    if "rope_parameters" in given:  # takes the place of all settings
        own = {name: value for name, value in own.items() if name != "rope_scaling"}
    values = read_sizes(DEFAULTS | own | given)
    check_bool(values["mlp_bias"], "mlp_bias")
    scalar = values.setdefault("query_pre_attn_scalar", values["head_dim"])
    check_number("query_pre_attn_scalar", scalar, 1e-6, 1e15)
    rope_parameters, local = (read_rope_parameters(values, kind) for kind in (FULL, SLIDING))
    activation = "hidden_activation" if "hidden_activation" in given else "hidden_act"
    for name, value in (SUPPORTED | {activation: own.get("hidden_act", "silu")}).items():
        for settings in (given, rope_parameters):
            if settings.get(name, value) != value:
                raise ValueError(f"{name} = {shown(settings[name])} is not supported")
    quantization_config = given.get("quantization_config") or None
    if not isinstance(quantization_config, dict | type(None)):
        raise ValueError(f"quantization_config cannot be {shown(quantization_config)}")
    limit = context_limit(rope_parameters, values["max_position_embeddings"])
    windows = _read_windows(values, raw, own)
    values.update(architectures=architectures, rope_parameters=rope_parameters, local_rope_parameters=local)
    values.update(windows=windows, dtype=read_dtype(given), quantization_config=quantization_config, raw=raw)
    values.update(context_limit=limit, max_model_len=limit)
    values["experts"] = _read_experts(values) if "num_experts" in own else None
    return DecoderConfig.from_values(values)


def _read_windows(values: Fields, raw: Fields, own: Fields) -> tuple[int, ...]:
    """Of each layer, from `layer_types`, or from what takes its place in this architecture."""
    num_layers = values["num_hidden_layers"]
    is_used = values.get("use_sliding_window", True)
    check_bool(is_used, "use_sliding_window")
    window = raw.get("sliding_window", own["sliding_window"]) if "sliding_window" in own else None
    if not is_used or window is None:
        window = 0
        kinds = [FULL] * num_layers
    else:
        check_size("sliding_window", window)
        pattern = {name: values[name] if name in own else 0 for name in WINDOW_PATTERN}
        for name, number in pattern.items():
            check_number(name, number, 0, MAX_SIZE)
        first, every = pattern.values()
        is_full = [i < first or every and (i + 1) % every == 0 for i in range(num_layers)]
        kinds = [FULL if each else SLIDING for each in is_full]
    kinds = values.get("layer_types", kinds)
    allowed = [FULL, SLIDING] if window else [FULL]
    is_good = isinstance(kinds, list) and len(kinds) >= num_layers and all(kind in allowed for kind in kinds)
    check(is_good, f"layer_types must be {' or '.join(map(repr, allowed))} for each layer", kinds)
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _read_experts(values: Fields) -> ExpertsConfig:
    values["num_experts"] = values.get("num_local_experts", values["num_experts"])  # the newer spelling
    if values["moe_intermediate_size"] is None:
        values["moe_intermediate_size"] = values["intermediate_size"]
    experts = ExpertsConfig(*(values[field.name] for field in fields(ExpertsConfig)))
    check_size("num_experts", experts.num_experts, MAX_EXPERTS)
    check_size("num_experts_per_tok", experts.num_experts_per_tok, experts.num_experts)
    for name in ("moe_intermediate_size", "decoder_sparse_step"):
        check_size(name, values[name])
    check_bool(experts.norm_topk_prob, "norm_topk_prob")
    layers = experts.mlp_only_layers
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    check(is_list, "mlp_only_layers must be a list of integers", layers)
    return experts
