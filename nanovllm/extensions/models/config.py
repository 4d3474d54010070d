"""The configuration of a decoder that has more than Qwen3: windows, experts, other rotations.

One spelling for what files of many models say; what a file leaves out is in the model's `Facts`.
"""

from dataclasses import dataclass, field, replace

import torch

from nanovllm.checkpoints.model_config import (
    MAX_SIZE,
    ModelConfig,
    check_number,
    check_size,
    read_sizes,
)
from nanovllm.extensions.experts.config import ExpertsConfig, read_experts
from nanovllm.extensions.models.rope import (
    FULL,
    SLIDING,
    Fields,
    check_fields,
    check_fixed,
    context_limit,
    read_rope_parameters,
)
from nanovllm.utils.validation import check, check_bool

DEFAULTS = {"rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False}
# Before which layer there is no window, and every which layer has none.
WINDOW_PATTERN = "max_window_layers", "sliding_window_pattern"
# Settings that may have this value only.
FIXED = {"partial_rotary_factor": 1.0, "final_logit_softcapping": None, "attn_logit_softcapping": None}
FIXED |= {"use_bidirectional_attention": False, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """
    `architectures` has the one whose class here is to be used; without one transformers builds the model
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


def read_decoder(raw: Fields, given: Fields, architectures: list[str], own: Fields) -> DecoderConfig:
    """
    From the fields that a file has, `given`, and its model's defaults, `own`. The last two are empty for one
    without a class here. Raises ValueError naming what is wrong or not supported.
    """
    if "rope_parameters" in given:  # takes the place of all settings
        own = own | {"rope_scaling": {}}
    values = read_sizes(DEFAULTS | own | given)
    scalar = values.setdefault("query_pre_attn_scalar", values["head_dim"])
    check_number("query_pre_attn_scalar", scalar, 1e-6, 1e15)
    rope, local_rope = (read_rope_parameters(values, kind) for kind in (FULL, SLIDING))
    activation = "hidden_activation" if "hidden_activation" in given else "hidden_act"
    for settings in (given, rope):
        check_fixed(settings, FIXED | {activation: own.get("hidden_act", "silu")})
    quantization_config = given.get("quantization_config") or {}
    check_fields("quantization_config", quantization_config)
    limit = context_limit(rope, values["max_position_embeddings"])
    made = dict(
        architectures=architectures,
        mlp_bias="mlp_bias" in own and check_bool(values["mlp_bias"], "mlp_bias"),
        rope_parameters=rope,
        local_rope_parameters=local_rope,
        windows=_read_windows(values, raw, own),
        quantization_config=quantization_config or None,
        raw=raw,
        context_limit=limit,
        max_model_len=limit,
        experts=read_experts(values, own),
    )
    return DecoderConfig.from_values(values | made)


def _read_windows(values: Fields, raw: Fields, own: Fields) -> tuple[int, ...]:
    """Of each layer, from `layer_types`, or from what takes its place in this architecture."""
    num_layers, window, kinds = values["num_hidden_layers"], None, []
    if check_bool(values.get("use_sliding_window", True), "use_sliding_window") and "sliding_window" in own:
        window = raw.get("sliding_window", own["sliding_window"])  # null is none
    if window is not None:
        check_size("sliding_window", window)
        first, every = (values[name] if name in own else 0 for name in WINDOW_PATTERN)
        check_number(WINDOW_PATTERN[0], first, 0, MAX_SIZE)
        check_number(WINDOW_PATTERN[1], every, 0, MAX_SIZE)
        kinds = [FULL if i < first or every and (i + 1) % every == 0 else SLIDING for i in range(num_layers)]
    kinds = values.get("layer_types", kinds or [FULL] * num_layers)
    allowed = [FULL, SLIDING] if window else [FULL]
    is_good = isinstance(kinds, list) and len(kinds) >= num_layers and all(kind in allowed for kind in kinds)
    check(is_good, f"layer_types must be {' or '.join(map(repr, allowed))} for each layer", kinds)
    return tuple(window if kind == SLIDING else 0 for kind in kinds)
