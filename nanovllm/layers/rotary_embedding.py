"""Rotary position embedding: every head's two halves are rotated against each other by angles that grow with
the position.

Knows the frequency scalings that checkpoints ask for; the rest of the model sees one table of cosines and
sines. Sources: RoPE (arXiv:2104.09864), linear interpolation (arXiv:2306.15595), YaRN (arXiv:2309.00071), and
Llama 3.1's release for `llama3`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Rotate x [tokens, heads, head_dim] in float32, by cos and sin [tokens, 1, head_dim] as
    `RotaryEmbedding.angles` returns them. Returns x's dtype.
    """
    wide = x.float()
    return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """
    Holds `cos_sin_cache`, float32 [max_position, head_dim]: the cosines of each position, then its sines.
    """

    def __init__(self, inverse_frequencies: Tensor, max_position: int, scale: float = 1.0):
        super().__init__()
        positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("cos_sin_cache", table.to(torch.get_default_device()), persistent=False)
        self._last_angles: tuple[Tensor, ...] = (torch.empty(0),)  # positions, cosines and sines

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens]; query and key [tokens, heads, head_dim], not changed."""
        rotated = apply_rotary_emb(torch.cat((query, key), dim=1), *self.angles(positions))
        return rotated.split_with_sizes((query.shape[1], key.shape[1]), dim=1)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """
        Cosines and sines for both halves of a head, [tokens, 1, head_dim]: those sines are negative that the
        second half gets into the first with. Every layer of a step asks with the same tensor, which nobody
        changes, so they are looked up once.
        """
        last, *found = self._last_angles
        if last is not positions:
            cos, sin = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
            found = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
            self._last_angles = positions, *found
        return tuple(found)


def get_rope(head_dim: int, max_position: int, parameters: dict[str, Any]) -> RotaryEmbedding:
    """The embedding that `rope_parameters` of a `ModelConfig` describe, where they were checked."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies, scale = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    match parameters["rope_type"]:
        case "linear":
            frequencies /= parameters["factor"]
        case "frequency_factors":
            frequencies /= torch.tensor(parameters["factors"], dtype=torch.float32, device="cpu")
        case "llama3":
            frequencies = _scale_llama3(frequencies, parameters)
        case "yarn":
            frequencies, scale = _scale_yarn(frequencies, parameters), _yarn_attention_scale(parameters)
    return RotaryEmbedding(frequencies, max_position, scale)


def _scale_llama3(frequencies: Tensor, p: dict[str, Any]) -> Tensor:
    """Long waves are slowed down by `factor`, short ones kept, those between blended."""
    turns = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    return _blend(frequencies, p["factor"], kept)


def _scale_yarn(frequencies: Tensor, p: dict[str, Any]) -> Tensor:
    """Dimensions that turn more than `beta_fast` times are kept, less than `beta_slow` times slowed down."""
    dim = 2 * len(frequencies)

    def dimension(turns: float) -> float:  # the dimension that makes this many turns over the original length
        context = p["original_max_position_embeddings"]
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = dimension(p.get("beta_fast", 32)), dimension(p.get("beta_slow", 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, device="cpu") - low) / max(high - low, 0.001)
    return _blend(frequencies, p["factor"], 1 - ramp)


def _yarn_attention_scale(p: dict[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(max(p["factor"], 1)) + 1.0

    if "attention_factor" in p:
        return p["attention_factor"]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return scale(p["mscale"]) / scale(p["mscale_all_dim"])
    return scale(1.0)


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """`kept` is the share of each frequency that is not divided by `factor`, where it is from 0 to 1."""
    kept = kept.clamp(0, 1)
    return frequencies * kept + frequencies / factor * (1 - kept)
