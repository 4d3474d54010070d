"""Weights as the compiled functions read them: one piece of memory, in the order in which it is read."""

import torch
import torch.nn.functional as F
from torch import Tensor

LANES, GROUP = 16, 32  # of a block: outputs, and inputs
HALF = GROUP // 2
# Blocks of codes of 4 bits; of 8; and of 8 where either HALF has a scale, and there are no zeros.
NIBBLES, BYTES, HALVES = range(3)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, kind: int, bias: Tensor | None = None) -> Tensor:
    """
    codes * scales + zeros, int8 [outputs, groups, inputs of a scale] and [outputs, groups], as uint8 [tiles,
    bytes]. A tile is the biases of LANES outputs, float32, and blocks of this kind: the scale and the zero,
    or both scales, in bfloat16, then codes without a sign. The instruction multiplies four neighbouring
    inputs: these are a word, and words of all outputs follow each other. Codes of 4 bits share a byte with
    those of the input HALF further on.
    """
    outputs, tiles = len(codes), len(codes) // LANES
    words = codes.reshape(tiles, LANES, -1, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    words = words.contiguous().view(torch.uint8) + (8 if kind == NIBBLES else 128)
    if kind == NIBBLES:
        low, high = words.chunk(2, dim=2)
        words = low | high << 4
    pairs = scales if kind == HALVES else torch.stack((scales, zeros), dim=-1)
    pairs = pairs.bfloat16().reshape(tiles, LANES, -1, 2).transpose(1, 2)
    blocks = torch.cat((pairs.contiguous().view(torch.uint8).flatten(2), words.flatten(2)), dim=-1)
    start = torch.zeros(outputs) if bias is None else bias.float()
    return torch.cat((start.view(tiles, LANES).view(torch.uint8), blocks.flatten(1)), dim=-1)


def quantise(weight: Tensor) -> Tensor:
    """A matrix [outputs, inputs] in 8 bits with a scale for GROUP inputs, packed. Zeros fill up its tiles."""
    tiles = []
    for rows in F.pad(weight, (0, 0, 0, -len(weight) % LANES)).split(2**10):
        groups = rows.float().unflatten(1, (-1, GROUP))
        scales = (groups.abs().amax(-1) / 127).clamp_min(1e-30).bfloat16().float()
        codes = (groups / scales.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
        tiles.append(pack(codes, scales, torch.zeros_like(scales), BYTES))
    return torch.cat(tiles)
