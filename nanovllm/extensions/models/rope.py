"""Rotary settings that files have besides `rope_theta`, in every spelling: scalings for longer contexts.

They end as the numbers that the core's table of rotations is made of. Sources: linear interpolation
(arXiv:2306.15595), YaRN (arXiv:2309.00071), and Llama 3.1's release for `llama3`.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from nanovllm.checkpoints.model_config import check_number, check_size
from nanovllm.extensions.models.facts import Fields
from nanovllm.utils.validation import shown

FULL = "full_attention"
SLIDING = "sliding_attention"
# The kinds of rotary scaling, and which numbers each of them needs.
ROPE_TYPES = {"default": [], "frequency_factors": [], "linear": ["factor"], "yarn": ["factor"]}
ROPE_TYPES["llama3"] = ["factor", "low_freq_factor", "high_freq_factor"]
ROPE_NUMBERS = (
    "rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow "
    "attention_factor attn_factor mscale mscale_all_dim"
).split()
# What else files say of rotations. A part of it has no effect here: of text alone all three positions of
# mRoPE are equal, and `finetuned` is a remark.
OTHER_KEYS = """
    rope_type type factors truncate extrapolation_factor apply_yarn_scaling partial_rotary_factor
    mrope_section mrope_interleaved finetuned
""".split()


def check_rope_keys(given: Fields, others: Collection[str] = ()) -> None:
    """Raise ValueError naming a rotary setting that nobody would honour."""
    names = {name for name, value in given.items() if value is not None}
    known = {*ROPE_NUMBERS, *OTHER_KEYS, *others}
    if unknown := sorted(map(str, names - known)):
        known_ones = ", ".join(sorted(known))
        raise ValueError(f"rotary setting {shown(unknown[0])} is not known; known ones: {known_ones}")
    if {"attn_factor", "attention_factor"} <= names:
        both = "attn_factor, times YaRN's own, and attention_factor, in its place,"
        raise ValueError(f"{both} exclude each other")
    for name, value in (("extrapolation_factor", 1), ("apply_yarn_scaling", True)):
        if name in names and given[name] != value:
            raise ValueError(f"{name} = {shown(given[name])} is not supported, only {value}")


def read_rope_parameters(values: Fields, layer_type: str) -> Fields:
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
    check_rope_keys(settings)
    for name in ROPE_NUMBERS:
        if name in settings or name in ROPE_TYPES[kind]:
            check_number(name, settings.get(name), 2 if name == "rope_theta" else 1e-6, 1e15)
    if kind == "frequency_factors":
        factors = settings.get("factors")
        count = values["head_dim"] // 2
        if not isinstance(factors, list) or len(factors) != count:
            raise ValueError(f"rotary factors must be {count} numbers, got {shown(factors)}")
        for factor in factors:
            check_number("each of the rotary factors", factor, 1e-6, 1e15)
    if kind == "llama3" and settings["low_freq_factor"] >= settings["high_freq_factor"]:
        raise ValueError(f"high_freq_factor must be more than low_freq_factor, got {shown(settings)}")
    if kind != "default" or "attn_factor" in settings:
        settings |= scale_frequencies(settings, values["head_dim"])
    return settings


def context_limit(rope_parameters: Fields, trained: int) -> int:
    """
    How many positions the checkpoint is for. Scaling extends what it was trained on by its factor, which
    `max_position_embeddings` counts already in some checkpoints (Llama 3.1's) and in others not (Qwen3's).
    """
    if "factor" not in ROPE_TYPES[rope_parameters["rope_type"]]:
        return trained
    limit = int(max(trained, rope_parameters["factor"] * rope_parameters["original_max_position_embeddings"]))
    check_size("the context, extended by the rotary factor,", limit)
    return limit


def scale_frequencies(p: Fields, head_dim: int) -> Fields:
    """What `get_rope` takes in place of `rope_theta`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / p["rope_theta"] ** exponents
    kept = None
    scale = 1.0
    match p["rope_type"]:
        case "linear":
            frequencies /= p["factor"]
        case "frequency_factors":
            frequencies /= torch.tensor(p["factors"], dtype=torch.float32, device="cpu")
        case "llama3":
            kept = _kept_by_llama3(frequencies, p)
        case "yarn":
            kept = _kept_by_yarn(len(frequencies), p)
            scale = _yarn_attention_scale(p)
    if kept is not None:  # the share of each frequency that is not divided by the factor
        kept = kept.clamp(0, 1)
        frequencies = frequencies * kept + frequencies / p["factor"] * (1 - kept)
    return {"inverse_frequencies": frequencies.tolist(), "amplitude": scale * p.get("attn_factor", 1.0)}


def _kept_by_llama3(frequencies: Tensor, p: Fields) -> Tensor:
    """Long waves are slowed down, short ones kept, those between blended."""
    turns = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    return (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])


def _kept_by_yarn(count: int, p: Fields) -> Tensor:
    """Dimensions that turn more than `beta_fast` times are kept, less than `beta_slow` times slowed down."""
    context = p["original_max_position_embeddings"]
    dim = 2 * count
    low, high = (  # the dimensions that make so many turns over the original length
        dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))
        for turns in (p.get("beta_fast", 32), p.get("beta_slow", 1))
    )
    if p.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    return 1 - (torch.arange(count, device="cpu") - low) / max(high - low, 0.001)


def _yarn_attention_scale(p: Fields) -> float:
    if "attention_factor" in p:
        return p["attention_factor"]
    weights = 1.0, 0.0
    if {"mscale", "mscale_all_dim"} <= p.keys():
        weights = p["mscale"], p["mscale_all_dim"]
    scale, divisor = (0.1 * weight * math.log(max(p["factor"], 1)) + 1.0 for weight in weights)
    return scale / divisor
