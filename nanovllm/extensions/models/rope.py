"""Rotary settings that files have besides `rope_theta`, in every spelling: scalings for longer contexts.

They end as the numbers that the core's table of rotations is made of, which transformers computes: linear
interpolation (arXiv:2306.15595), YaRN (arXiv:2309.00071), and Llama 3.1's `llama3`.
"""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.checkpoints.model_config import check_size
from nanovllm.utils.validation import check, is_number, number, shown

Fields = dict[str, Any]  # of config.json

FULL = "full_attention"
SLIDING = "sliding_attention"
# The kinds of rotary scaling, and which numbers each of them needs.
ROPE_TYPES = {
    "default": [],
    "frequency_factors": [],
    "linear": ["factor"],
    "yarn": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
}
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


def check_fixed(given: Fields, fixed: Fields) -> None:
    """Raise ValueError naming a setting that does not have the one value that is supported."""
    for name, value in fixed.items():
        if given.get(name) not in (None, value):
            raise ValueError(f"{name} = {shown(given[name])} is not supported, only {value}")


def read_object(fields: Fields, name: str) -> Fields:
    """Those that a field has, {} if there are none. Raises ValueError."""
    found = fields.get(name) or {}
    check(isinstance(found, dict), f"{name} must be an object", found)
    return found


def check_rope_keys(given: Fields, others: Collection[str] = ()) -> None:
    """Raise ValueError naming a rotary setting that nobody would honour."""
    names = {str(name) for name, value in given.items() if value is not None}
    known = {*ROPE_NUMBERS, *OTHER_KEYS, *others}
    if unknown := names - known:
        raise ValueError(
            f"rotary setting {shown(min(unknown))} is not known; known ones: {', '.join(sorted(known))}"
        )
    if {"attn_factor", "attention_factor"} <= names:
        raise ValueError(
            "attn_factor, times YaRN's own, and attention_factor, in its place, exclude each other"
        )
    check_fixed(given, FIXED)


def read_rope_parameters(values: Fields, layer_type: str) -> Fields:
    """
    All rotary settings of one kind of layer, from `rope_parameters` (which may have them by kind) or
    `rope_theta` and `rope_scaling`, beside which `rope_local_base_freq` is for layers with a window. Raises
    ValueError unless every angle will be a finite number, which the ranges ensure.
    """
    has_kinds = "rope_local_base_freq" in values
    is_local = has_kinds and layer_type == SLIDING
    settings = {
        "rope_theta": values["rope_local_base_freq" if is_local else "rope_theta"],
        "original_max_position_embeddings": values["max_position_embeddings"],
    }
    for spelling in ("rope_scaling", "rope_parameters"):
        found = read_object(values, spelling)
        if has_kinds and found.keys() & {FULL, SLIDING}:
            found = read_object(found, layer_type)
        elif is_local:
            continue
        settings |= {name: value for name, value in found.items() if value is not None}
    kind = settings.setdefault("rope_type", settings.get("type", "default"))
    check(kind in [*ROPE_TYPES], f"rope_type must be one of {[*ROPE_TYPES]}", kind)  # which may be no text
    check_rope_keys(settings)
    part = settings.setdefault("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    number(0, 1)(part, "partial_rotary_factor")
    size = int(values["head_dim"] * part)
    is_good = size > 0 and size % 2 == 0
    check(is_good, "partial_rotary_factor must leave an even number of rows of each head", part)
    for name in ROPE_NUMBERS:
        if name in settings or name in ROPE_TYPES[kind]:
            number(2 if name == "rope_theta" else 1e-6, 1e15)(settings.get(name), name)
    if kind == "frequency_factors":
        factors, count = settings.get("factors"), size // 2
        are_many = isinstance(factors, list) and len(factors) == count
        are_good = are_many and all(is_number(factor, float, 1e-6, 1e15) for factor in factors)
        check(are_good, f"rotary factors must be {count} numbers from 1e-06 to 1e+15", factors)
    if kind == "llama3":
        is_band = settings["low_freq_factor"] <= settings["high_freq_factor"]
        check(is_band, "high_freq_factor must not be less than low_freq_factor", settings)
    return settings | scale_frequencies(settings, values)


def rotating_layers(values: Fields) -> list[int]:
    """Of each layer, whether it rotates, 0 or 1: from `no_rope_layers`, else all but every n-th do."""
    num_layers = values["num_hidden_layers"]
    interval = check_size(values.get("no_rope_layer_interval", 4), "no_rope_layer_interval")
    rotates = values.get("no_rope_layers") or [(i + 1) % interval > 0 for i in range(num_layers)]
    are_all = isinstance(rotates, list) and len(rotates) >= num_layers
    is_good = are_all and all(each in (0, 1) for each in rotates)
    check(is_good, "no_rope_layers must have 0 or 1 for each layer", rotates)
    return rotates


def context_limit(rope_parameters: Fields, trained: int) -> int:
    """
    How many positions the checkpoint is for. Scaling extends what it was trained on by its factor, which
    `max_position_embeddings` counts already in some checkpoints (Llama 3.1's) and in others not (Qwen3's).
    """
    if "factor" not in ROPE_TYPES[rope_parameters["rope_type"]]:
        return trained
    extended = rope_parameters["factor"] * rope_parameters["original_max_position_embeddings"]
    return check_size(int(max(trained, extended)), "the context, extended by the rotary factor,")


def scale_frequencies(settings: Fields, values: Fields) -> Fields:
    """What `get_rope` takes besides `rope_theta`, or in its place."""
    kind, amplitude = settings["rope_type"], settings.get("attn_factor", 1.0)
    if kind == "default" and settings["partial_rotary_factor"] == 1:
        return {"amplitude": amplitude}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind == "frequency_factors":  # linear, with a factor of each frequency
        factors = torch.tensor(settings["factors"], dtype=torch.float32, device="cpu")
        kind, settings = "linear", settings | {"factor": factors}
    elif kind == "default":
        kind, settings = "linear", settings | {"factor": 1.0}
    # In place of a configuration, where its versions look for settings in different places.
    spellings = {
        "rope_parameters": settings,
        "rope_scaling": settings,
        "standardize_rope_params": lambda: None,
    }
    config = SimpleNamespace(**values | settings | spellings)
    frequencies, own_amplitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    # An empty band of `llama3` may have a frequency right on it.
    check(bool(frequencies.isfinite().all()), "rotary settings must make finite angles", kind)
    still = [0.0] * (values["head_dim"] // 2 - len(frequencies))  # of what is not rotated
    return {"inverse_frequencies": frequencies.tolist() + still, "amplitude": amplitude * own_amplitude}
