"""Rotary position embedding: every head's two halves are rotated against each other by angles that grow with
the position.

The model sees one table of cosines and sines. Source: RoPE (arXiv:2104.09864).
"""

from typing import Any

import torch
from torch import Tensor, nn


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Rotate x [tokens, heads, head_dim] in float32, by cos and sin [tokens, 1, head_dim], whose halves are
    alike but for the sign: those sines are negative that the second half gets into the first with. Returns
    x's dtype.
    """
    wide = x.float()
    halves_swapped = wide.roll(x.shape[-1] // 2, -1)
    rotated = (wide * cos).addcmul_(halves_swapped, sin)
    return rotated.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """
    Holds `cos_sin_cache`, float32 [max_position, head_dim]: the cosines of each position, then its sines.
    """

    _last_positions: Tensor | None = None

    def __init__(self, cos_sin_cache: Tensor):
        super().__init__()
        self.register_buffer("cos_sin_cache", cos_sin_cache, persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens]; query and key [tokens, heads, head_dim], not changed."""
        # Every layer of a step asks with the same tensor, which nobody changes.
        if self._last_positions is not positions:
            angles = self.cos_sin_cache[positions].unsqueeze(1)
            cos, sin = angles.chunk(2, dim=-1)
            self._angles = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
            self._last_positions = positions
        heads = torch.cat((query, key), dim=1)
        rotated = apply_rotary_emb(heads, *self._angles)
        return rotated.tensor_split([query.shape[1]], dim=1)


def get_rope(head_dim: int, max_position: int, parameters: dict[str, Any]) -> RotaryEmbedding:
    """
    The embedding that `rope_parameters` of a `ModelConfig` describe: by `rope_theta`, or where that is not
    all, by the numbers themselves, `inverse_frequencies` and `amplitude`, which cosines and sines are
    multiplied by.
    """
    options = {"dtype": torch.float32, "device": "cpu"}
    exponents = torch.arange(0, head_dim, 2, **options) / head_dim
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    if "inverse_frequencies" in parameters:
        frequencies = torch.tensor(parameters["inverse_frequencies"], **options)
    positions = torch.arange(max_position, **options)
    angles = torch.outer(positions, frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    table *= parameters.get("amplitude", 1.0)
    return RotaryEmbedding(table.to(torch.get_default_device()))
