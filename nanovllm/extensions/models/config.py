"""The configuration of a decoder that has more than Qwen3: windows, experts, other rotations.

One spelling for what files of many models say; what a file leaves out the class of its model has in
`defaults`. What reads the files of models without a class here is handed in, so that nothing here knows it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm.checkpoints.model_config import MAX_SIZE, ModelConfig, check_size, read_sizes
from nanovllm.extensions.experts.config import ExpertsConfig, read_experts
from nanovllm.extensions.models.rope import (
    FULL,
    SLIDING,
    Fields,
    check_fixed,
    check_rope_keys,
    context_limit,
    read_object,
    read_rope_parameters,
)
from nanovllm.utils.validation import check, check_bool, number, shown

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
# What a file may ask for if its model has a default. A window is for layers from `max_window_layers` on,
# without every `sliding_window_pattern`-th.
OPTIONAL = {
    "mlp_bias": False,
    "use_qk_norm": True,
    "sliding_window": None,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "sliding_window_pattern": 0,
}
# Other names of fields.
SPELLINGS = {
    "num_layers": "num_hidden_layers",
    "n_routed_experts": "num_experts",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
# A window of null is none; any other null asks for the model's default.
WINDOWS = "sliding_window", "attention_chunk_size"
# Settings that may have this value only.
FIXED = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "qkv_bias": True,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """
    `architectures` has the one whose class here is to be used; without one transformers builds the model
    from `raw`, the file itself, and of all other fields only sizes count. `rope_parameters` are all rotary
    settings, whichever way the file spells them, of layers without a window, and `local_rope_parameters`
    those of the others. `windows` has of each layer to how many tokens it attends (0: to all).
    """

    mlp_bias: bool
    use_qk_norm: bool  # if the model has such norms at all
    local_rope_parameters: Fields
    windows: tuple[int, ...]
    query_pre_attn_scalar: float  # attention scores are divided by its root
    experts: ExpertsConfig | None  # None if each layer has an MLP
    facts: Fields  # what `read_facts` of the model's class has found
    quantization_config: Fields | None  # as the file has it; None if weights are not quantised
    raw: Fields = field(repr=False)

    def window(self, layer: int) -> int:
        """To how many tokens a layer attends; 0 if these are all that there can be."""
        window = self.windows[layer]
        return window if window < self.max_model_len else 0

    @property
    def tokens_in_reach(self) -> int:
        windows = [*map(self.window, range(self.num_hidden_layers))]
        return max(windows) if all(windows) else 0

    @property
    def divided_sizes(self) -> dict[str, int]:
        sizes = super().divided_sizes
        if self.experts is not None:
            sizes["moe_intermediate_size"] = self.experts.moe_intermediate_size
            sizes["shared_expert_intermediate_size"] = self.experts.shared_expert_intermediate_size
        return sizes

    def usual_dtype(self, device: str) -> str:
        """Weights of up to 6 bits stay packed on a CPU that multiplies bfloat16 itself."""
        bits = (self.quantization_config or {}).get("bits_per_weight", 0)
        stays_packed = 0 < bits < 7 and torch.cpu._is_avx512_bf16_supported()
        return "bfloat16" if stays_packed else super().usual_dtype(device)


def read_any_config(
    source: str,
    raw: Fields,
    model_impl: str,
    models: dict[str, Any],
    read_other: Callable[..., Fields],
    type_decides: Callable[[list[str]], bool],
) -> DecoderConfig:
    """
    `models` are classes, by the names of architectures. `type_decides` says of such names whether the
    `model_type` counts in their place. Raises ValueError naming the source and what is wrong or not
    supported.
    """
    known = ", ".join(models)
    names = raw.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    raw = raw | {"architectures": names}
    try:
        found = [models[name] for name in map(str, names) if name in models]
        if not found and type_decides(names):
            found = [model for model in models.values() if model.model_type == raw.get("model_type")]
        if found and model_impl != "transformers":
            return read_decoder(raw, raw, found[0])
        if model_impl == "native":
            raise ValueError(
                f"model_impl='native' has no class for architectures {shown(names)}, only for {known}"
            )
        try:
            sizes = read_other(raw, check_rope_keys)
        except ValueError as error:
            raise ValueError(f"{error}; known without transformers: {known}") from None
        return read_decoder(raw, sizes)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read_decoder(raw: Fields, given: Fields, model: Any = None) -> DecoderConfig:
    """
    From the fields that a file has, or others by their names, `given`, for a model that has a class here, or
    None. Raises ValueError naming what is wrong or not supported.
    """
    own = model.defaults if model else {}
    given = {name: value for name, value in given.items() if value is not None or name in WINDOWS}
    given = {SPELLINGS.get(name, name): value for name, value in given.items()} | given
    activation = "hidden_activation" if "hidden_activation" in given else "hidden_act"
    check_fixed(given, FIXED | {activation: own.get("hidden_act", "silu")})
    if "rope_parameters" in given:  # takes the place of all settings
        own = own | {"rope_scaling": {}}
    asked = {name: value for name, value in given.items() if name in own or name not in OPTIONAL}
    values = read_sizes(DEFAULTS | OPTIONAL | own | asked)
    needs_layer_types = values["use_sliding_window"] and getattr(model, "needs_layer_types", False)
    if needs_layer_types and "layer_types" not in values:
        raise ValueError("use_sliding_window needs layer_types")
    facts = model.read_facts(values) if hasattr(model, "read_facts") else {}
    values |= facts
    number(1e-6, 1e15)(
        values.setdefault("query_pre_attn_scalar", values["head_dim"]), "query_pre_attn_scalar"
    )
    for name in ("mlp_bias", "use_qk_norm"):
        check_bool(values[name], name)
    rope, local_rope = (read_rope_parameters(values, kind) for kind in (FULL, SLIDING))
    if "partial_rotary_factor" not in own:
        check_fixed(rope, {"partial_rotary_factor": 1.0})
    limit = context_limit(rope, values["max_position_embeddings"])
    values |= {
        "architectures": [model.__name__] if model else [],
        "rope_parameters": rope,
        "local_rope_parameters": local_rope,
        "windows": facts.get("windows") or _read_windows(values),
        "quantization_config": read_object(raw, "quantization_config") or None,
        "facts": facts,
        "raw": raw,
        "context_limit": limit,
        "max_model_len": limit,
        "experts": read_experts(values, own | facts),
    }
    return DecoderConfig.from_values(values)


def _read_windows(values: Fields) -> tuple[int, ...]:
    """Of each layer, from `layer_types`, or from what takes its place in this architecture."""
    num_layers, window = values["num_hidden_layers"], values["sliding_window"]
    kinds, allowed = [FULL] * num_layers, [FULL]
    if check_bool(values["use_sliding_window"], "use_sliding_window") and window is not None:
        allowed.append(SLIDING)
        check_size(window, "sliding_window")
        first, every = (
            number(0, MAX_SIZE)(values[name], name)
            for name in ("max_window_layers", "sliding_window_pattern")
        )
        kinds = [FULL if i < first or every and (i + 1) % every == 0 else SLIDING for i in range(num_layers)]
    kinds = values.get("layer_types", kinds)
    is_good = isinstance(kinds, list) and len(kinds) >= num_layers and all(kind in allowed for kind in kinds)
    check(is_good, f"layer_types must be {' or '.join(map(repr, allowed))} for each layer", kinds)
    return tuple(window if kind == SLIDING else 0 for kind in kinds)
