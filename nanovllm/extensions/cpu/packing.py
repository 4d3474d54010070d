"""Weights as the compiled functions read them: one piece of memory, in the order in which it is read."""

import torch
import torch.nn.functional as F
from torch import Tensor

LANES, GROUP = 16, 32  # of a block: outputs, and inputs that share a scale


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, bias: Tensor | None = None) -> Tensor:
    """
    codes * scales + zeros, int8 [outputs, groups, GROUP] and [outputs, groups], as uint8 [tiles, bytes]. A
    tile is the biases of LANES outputs, float32, and blocks: scales and zeros in bfloat16, then codes without
    a sign. The instruction multiplies four neighbouring inputs: these are a word, and words of all outputs
    follow each other. Codes of 4 bits share a byte with those of the input GROUP // 2 further on.
    """
    outputs, groups, _ = codes.shape
    tiles = outputs // LANES
    words = codes.view(tiles, LANES, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    words = words.contiguous().view(torch.uint8) + 2 ** (bits - 1)
    if bits == 4:
        low, high = words.chunk(2, dim=2)
        words = low | high << 4
    pairs = torch.stack((scales, zeros), dim=-1).bfloat16().view(tiles, LANES, groups, 2).transpose(1, 2)
    blocks = torch.cat((pairs.contiguous().view(torch.uint8).flatten(2), words.flatten(2)), dim=-1)
    start = torch.zeros(outputs) if bias is None else bias.float()
    return torch.cat((start.view(tiles, LANES).view(torch.uint8), blocks.flatten(1)), dim=-1)


def quantise(weight: Tensor) -> Tensor:
    """A matrix [outputs, inputs] in 8 bits with a scale for GROUP inputs, packed. Zeros fill up its tiles."""
    rows = F.pad(weight, (0, 0, 0, -len(weight) % LANES))
    return torch.cat([_quantise(piece) for piece in rows.split(2**10)])


def _quantise(weight: Tensor) -> Tensor:
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 127).clamp_min(1e-30).bfloat16().float()
    codes = (groups / scales.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
    return pack(codes, scales, torch.zeros_like(scales), 8)
