"""Rotary settings that files have besides `rope_theta`, in every spelling: scalings for longer contexts.

They end as the numbers that the core's table of rotations is made of. Sources: linear interpolation
(arXiv:2306.15595), YaRN (arXiv:2309.00071), and Llama 3.1's release for `llama3`.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoints.model_config import check_number, check_size
from nanovllm.utils.validation import check, shown

Fields = dict[str, Any]  # of config.json

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
FIXED = {"extrapolation_factor": 1, "apply_yarn_scaling": True}
FLOAT32 = {"dtype": torch.float32, "device": "cpu"}  # as transformers computes frequencies


def check_fixed(given: Fields, fixed: Fields) -> None:
    """Raise ValueError naming a setting that does not have the one value that is supported."""
    for name, value in fixed.items():
        if given.get(name, value) != value:
            raise ValueError(f"{name} = {shown(given[name])} is not supported, only {value}")


def check_fields(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} cannot be {shown(value)}")


def check_rope_keys(given: Fields, others: Collection[str] = ()) -> None:
    """Raise ValueError naming a rotary setting that nobody would honour."""
    given = {name: value for name, value in given.items() if value is not None}
    known = {*ROPE_NUMBERS, *OTHER_KEYS, *others}
    if unknown := sorted(map(str, given.keys() - known)):
        known_ones = ", ".join(sorted(known))
        raise ValueError(f"rotary setting {shown(unknown[0])} is not known; known ones: {known_ones}")
    if {"attn_factor", "attention_factor"} <= given.keys():
        both = "attn_factor, times YaRN's own, and attention_factor, in its place,"
        raise ValueError(f"{both} exclude each other")
    check_fixed(given, FIXED)


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
        check_fields(spelling, found)
        if has_kinds and any(isinstance(value, dict) for value in found.values()):
            found = found.get(layer_type) or {}
            check_fields(f"{spelling} of {layer_type!r}", found)
        elif is_local:
            continue
        settings |= {name: value for name, value in found.items() if value is not None}
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
        factors, count = settings.get("factors"), values["head_dim"] // 2
        is_list = isinstance(factors, list) and len(factors) == count
        check(is_list, f"rotary factors must be {count} numbers", factors)
        for factor in factors:
            check_number("each of the rotary factors", factor, 1e-6, 1e15)
    if kind == "llama3":
        is_band = settings["low_freq_factor"] < settings["high_freq_factor"]
        check(is_band, "high_freq_factor must be more than low_freq_factor", settings)
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
    kind, scale = p["rope_type"], p.get("attn_factor", 1.0)
    exponents = torch.arange(0, head_dim, 2, **FLOAT32) / head_dim
    frequencies = 1.0 / p["rope_theta"] ** exponents
    divisor = p["factor"] if "factor" in ROPE_TYPES[kind] else 1.0
    kept = torch.zeros(1, **FLOAT32)  # the share of each frequency that is not divided
    if kind == "frequency_factors":
        divisor = torch.tensor(p["factors"], **FLOAT32)
    elif kind == "llama3":  # long waves are slowed down, short ones kept, those between blended
        turns = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    elif kind == "yarn":
        kept = _kept_by_yarn(head_dim, p)
        scale *= _yarn_attention_scale(p)
    kept = kept.clamp(0, 1)
    frequencies = frequencies * kept + frequencies / divisor * (1 - kept)
    return {"inverse_frequencies": frequencies.tolist(), "amplitude": scale}


def _kept_by_yarn(head_dim: int, p: Fields) -> Tensor:
    """Dimensions that turn more than `beta_fast` times are kept, less than `beta_slow` times slowed down."""
    context = p["original_max_position_embeddings"]
    low, high = (  # the dimensions that make so many turns over the original length
        head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))
        for turns in (p.get("beta_fast", 32), p.get("beta_slow", 1))
    )
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return 1 - (torch.arange(head_dim // 2, device="cpu") - low) / max(high - low, 0.001)


def _yarn_attention_scale(p: Fields) -> float:
    if "attention_factor" in p:
        return p["attention_factor"]
    weights = 1.0, 0.0
    if {"mscale", "mscale_all_dim"} <= p.keys():
        weights = p["mscale"], p["mscale_all_dim"]
    scale, divisor = (0.1 * weight * math.log(max(p["factor"], 1)) + 1.0 for weight in weights)
    return scale / divisor
