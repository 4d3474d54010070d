"""Random weights in each format."""

import math

import torch

from nanovllm.extensions.quantised.kernels.fp8_linear import QuantisedRows
from nanovllm.extensions.quantised.kernels.quantised_weight import FP4_TABLE, NF4_TABLE, QuantisedWeight, pack

# Kind of code; rows and inputs of a tile, 0 for all of them; what is subtracted or added besides.
FORMATS = {
    "fp8, a scale a row": ("fp8", (1, 0), None),
    "fp8, blocks": ("fp8", (128, 128), None),
    "int8, a scale a row": ("int8", (1, 0), None),
    "int8, a zero a row": ("int8", (1, 0), "zeros"),
    "int8, a scale a tensor": ("int8", (0, 0), None),
    "int8, groups of 16": ("int8", (1, 16), None),
    "int8, groups of 32 with offsets": ("int8", (1, 32), "offsets"),
    "int4, a scale a row": ("int4", (1, 0), None),
    "int4, a zero a row": ("int4", (1, 0), "zeros"),
    "int4, groups of 32": ("int4", (1, 32), None),
    "int4, groups of 32 with offsets": ("int4", (1, 32), "offsets"),
    "int4, groups of 64 with zeros": ("int4", (1, 64), "zeros"),
    "int4, groups of 128 with zeros": ("int4", (1, 128), "zeros"),
    "nf4": ("nf4", (1, 64), None),
    "fp4, groups of 16": ("fp4", (1, 16), None),
    "fp4, scales in bfloat16": ("fp4", (1, 16), None),
}


def make_weight(name: str, shape: tuple[int, int], device: str, rows: int = 0) -> QuantisedWeight:
    """Tiles end where parts of so many rows do."""
    kind, (height, width), besides = FORMATS[name]
    height = math.gcd(height, rows)
    tile = height or shape[0], width or shape[1]
    grid = -(-shape[0] // tile[0]), -(-shape[1] // tile[1])
    if kind == "fp8":
        codes = (60 * torch.randn(shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif kind == "int8":
        codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    else:
        codes = pack(torch.randint(16, shape, dtype=torch.uint8))
    zeros = offsets = None
    if besides == "zeros":
        limits = (0, 16, torch.uint8) if kind == "int4" else (-20, 20, torch.int8)
        zeros = torch.randint(*limits[:2], grid, dtype=limits[2]).to(device)
    if besides == "offsets":
        offsets = torch.randn(grid, device=device)
    scales = ((torch.rand(grid) + 0.5) / 100).to(device)
    if name.endswith("bfloat16"):
        scales = scales.bfloat16()
    zero_point = 8 if kind == "int4" and besides != "offsets" else 0  # which zeros take the place of
    weight = QuantisedWeight(codes.to(device), shape, scales, tile, zeros, zero_point, offsets)
    return weight._replace(table={"nf4": NF4_TABLE, "fp4": FP4_TABLE}.get(kind, 0))


def in_order(rows: QuantisedRows) -> torch.Tensor:
    """What permuted rows stand for, float64: the matrix unit takes four inputs from each of four threads."""
    pieces = rows.codes[: rows.rows].double().view(rows.rows, -1, 4, 2, 4, 4)
    return pieces.permute(0, 1, 4, 3, 2, 5).flatten(1) * rows.scales[: rows.rows, None].double()
