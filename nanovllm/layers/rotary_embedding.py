"""Rotary position embedding: every head's two halves are rotated against each other by angles that grow with
the position.

Knows the frequency scalings that checkpoints ask for; the rest of the model sees one table of cosines and
sines. Sources: RoPE (arXiv:2104.09864), linear interpolation (arXiv:2306.15595), YaRN (arXiv:2309.00071), and
Llama 3.1's release for `llama3`.
"""

import math
from typing import Any

import torch
from torch import nn


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """
    Rotate x [tokens, heads, head_dim] by cos, sin [tokens, 1, head_dim / 2], in float32. Returns x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """
    Holds `cos_sin_cache`, float32 [max_position, head_dim]: the cosines of each position, then its sines.
    """

    def __init__(self, inverse_frequencies: torch.Tensor, max_position: int, scale: float = 1.0):
        super().__init__()
        angles = torch.outer(
            torch.arange(max_position, dtype=torch.float32, device="cpu"), inverse_frequencies
        )
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("cos_sin_cache", table.to(torch.get_default_device()), persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [tokens]; query and key [tokens, heads, head_dim], not changed."""
        cos, sin = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        return apply_rotary_emb(query, cos, sin), apply_rotary_emb(key, cos, sin)


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """
    The checkpoint's rotary settings in one spelling, from `rope_parameters` or `rope_theta` + `rope_scaling`.
    """
    parameters = dict(getattr(hf_config, "rope_scaling", None) or {})
    parameters.update(getattr(hf_config, "rope_parameters", None) or {})
    parameters.setdefault("rope_theta", getattr(hf_config, "rope_theta", None) or 10000.0)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters["original_max_position_embeddings"] = (
        parameters.get("original_max_position_embeddings") or hf_config.max_position_embeddings
    )
    return parameters


def context_limit(hf_config: Any) -> int:
    """
    How many positions the checkpoint is for. Scaling extends what it was trained on by its factor, which
    `max_position_embeddings` counts already in some checkpoints (Llama 3.1's) and in others not (Qwen3's).
    """
    parameters, limit = rope_parameters(hf_config), hf_config.max_position_embeddings
    if parameters["rope_type"] not in ("linear", "llama3", "yarn"):
        return limit
    return int(max(limit, parameters["factor"] * parameters["original_max_position_embeddings"]))


def get_rope(head_dim: int, max_position: int, parameters: dict[str, Any]) -> RotaryEmbedding:
    """
    The embedding that `rope_parameters` describes. Raises ValueError naming an unknown type or a missing
    setting.
    """
    scalings = {
        "default": lambda frequencies, _: (frequencies, 1.0),
        "linear": lambda frequencies, p: (frequencies / p["factor"], 1.0),
        "llama3": _scale_llama3,
        "yarn": _scale_yarn,
        "frequency_factors": _divide_frequencies,
    }
    if nested := [key for key, value in parameters.items() if isinstance(value, dict)]:
        raise ValueError(f"settings for one kind of layer ({nested[0]!r}) are not supported")
    rope_type = parameters["rope_type"]
    if rope_type not in scalings:
        raise ValueError(f"rope type {rope_type!r} is not supported; known types: {', '.join(scalings)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1, got {parameters['partial_rotary_factor']}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    try:
        frequencies, scale = scalings[rope_type](1.0 / parameters["rope_theta"] ** exponents, parameters)
    except KeyError as error:
        raise ValueError(
            f"rope type {rope_type!r} needs {error.args[0]!r}, which the config does not give"
        ) from None
    return RotaryEmbedding(frequencies, max_position, scale)


def _divide_frequencies(frequencies: torch.Tensor, p: dict[str, Any]) -> tuple[torch.Tensor, float]:
    return frequencies / torch.tensor(p["factors"], dtype=torch.float32, device="cpu"), 1.0


def _scale_llama3(frequencies: torch.Tensor, p: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Long waves are slowed down by `factor`, short ones kept, those between blended."""
    turns = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    return _blend(frequencies, p["factor"], kept.clamp(0, 1)), 1.0


def _scale_yarn(frequencies: torch.Tensor, p: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Dimensions that turn more than `beta_fast` times are kept, less than `beta_slow` times slowed down."""
    dim, factor = 2 * len(frequencies), p["factor"]

    def dimension(turns: float) -> float:  # the dimension that makes this many turns over the original length
        context = p["original_max_position_embeddings"]
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, device="cpu") - low) / max(high - low, 0.001)
    scaled = _blend(frequencies, factor, 1 - ramp.clamp(0, 1))

    def attention_scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = p.get("attention_factor")
    if scale is None and p.get("mscale") and p.get("mscale_all_dim"):
        scale = attention_scale(p["mscale"]) / attention_scale(p["mscale_all_dim"])
    return scaled, attention_scale(1.0) if scale is None else scale


def _blend(frequencies: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    return frequencies * kept + frequencies / factor * (1 - kept)
