"""Rotary position embedding: every head's two halves are rotated against each other by angles that grow with
the position.

The model sees one table of cosines and sines. Source: RoPE (arXiv:2104.09864).
"""

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
        table = torch.cat((angles, angles), dim=-1)
        table[:, : angles.shape[1]].cos_()
        table[:, angles.shape[1] :].sin_()
        table *= scale
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
    """
    The embedding that `rope_parameters` of a `ModelConfig` describe: by `rope_theta`, or where that is not
    all, by the numbers themselves, `inverse_frequencies` and `amplitude`, which cosines and sines are
    multiplied by.
    """
    if "inverse_frequencies" in parameters:
        frequencies = torch.tensor(parameters["inverse_frequencies"], dtype=torch.float32, device="cpu")
    else:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / parameters["rope_theta"] ** exponents
    return RotaryEmbedding(frequencies, max_position, parameters.get("amplitude", 1.0))
