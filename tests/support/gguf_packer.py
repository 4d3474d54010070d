"""Matrices in GGUF's quantised types: the gguf package's own encoders, and plain ones for those it lacks."""

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from nanovllm.extensions.checkpoints.gguf_file import GGUFTensor
from nanovllm.extensions.quantised.gguf_blocks import IQ4_CODES

# Where the float16 numbers of a block are, in bytes.
FLOATS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
FLOATS |= {"Q2_K": (80, 82), "Q3_K": (108,)}


def encode(matrix: torch.Tensor, kind: str) -> np.ndarray:
    """float32 [..., values] as uint8 [..., bytes]."""
    if kind not in PACKERS:
        return quantize(matrix.numpy(), gguf.GGMLQuantizationType[kind]).view(np.uint8)
    blocks = PACKERS[kind](matrix.numpy().reshape(-1, 256))
    return blocks.reshape(*matrix.shape[:-1], -1)


def decode(encoded: np.ndarray, kind: str) -> torch.Tensor:
    """What the gguf package makes of it."""
    return torch.from_numpy(dequantize(encoded, gguf.GGMLQuantizationType[kind]))


def as_stored(encoded: np.ndarray, kind: str, **fields) -> GGUFTensor:
    """The rows as a tensor of a file."""
    type_ = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    shape = *encoded.shape[:-1], encoded.shape[-1] // num_bytes * size
    return GGUFTensor("file", "name", shape, type_, size, encoded, **fields)


def random_rows(rows: int, columns: int, kind: str, seed: int = 0) -> np.ndarray:
    """Blocks of arbitrary bytes, with scales of up to 1."""
    rng = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    for start in FLOATS.get(kind, (0,)):
        floats = rng.uniform(-1, 1, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = floats[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8)


def _nibbles(codes: np.ndarray, width: int) -> np.ndarray:
    """Rows of `width` codes, two of them in one row of bytes."""
    pairs = codes.reshape(len(codes), -1, 2, width)
    return (pairs[:, :, 0] & 15 | (pairs[:, :, 1] & 15) << 4).reshape(len(codes), -1).astype(np.uint8)


def _divide(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _pack_with_minimum(blocks: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K and Q5_K."""
    groups = blocks.reshape(-1, 8, 32)
    least = -groups.min(-1).clip(max=0)
    width = (groups.max(-1).clip(min=0) + least) / (2**bits - 1)
    scale, step = (each.max(-1, keepdims=True).astype(np.float16) / np.float16(63) for each in (width, least))
    scales = _divide(width, np.float32(scale)).round().clip(0, 63).astype(int)
    steps = _divide(least, np.float32(step)).round().clip(0, 63).astype(int)
    shifted = groups + (np.float32(step) * steps)[..., None]
    codes = _divide(shifted, np.broadcast_to((scale * np.float32(scales))[..., None], shifted.shape))
    codes = codes.round().clip(0, 2**bits - 1).astype(int)
    first, last = (slice(0, 4), slice(4, 8))
    packed = [each[:, first] | each[:, last] >> 4 << 6 for each in (scales, steps)]
    packed.append(scales[:, last] & 15 | (steps[:, last] & 15) << 4)
    fifth = [(codes >> 4 << np.arange(8)[:, None]).sum(1)] if bits == 5 else []
    parts = [_half(scale), _half(step), *packed, *fifth, _nibbles(codes, 32)]
    return np.concatenate([part.astype(np.uint8) for part in parts], -1)


def _pack_q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    width = np.abs(groups).max(-1) / 31
    scale = width.max(-1, keepdims=True).astype(np.float16) / np.float16(127)
    scales = _divide(width, np.float32(scale)).round().clip(-128, 127).astype(np.int8)
    codes = _divide(groups, np.broadcast_to((scale * np.float32(scales))[..., None], groups.shape))
    codes = codes.round().clip(-32, 31).astype(int).reshape(-1, 256) + 32
    upper = codes.reshape(-1, 2, 4, 32) >> 4 << np.arange(0, 8, 2)[:, None]
    parts = [_nibbles(codes, 64), upper.sum(2).reshape(-1, 64), scales.view(np.uint8), _half(scale)]
    return np.concatenate([part.astype(np.uint8) for part in parts], -1)


def _split_width(width: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of groups [blocks, groups]: a block's float16, the integers that it is multiplied by, the products."""
    scale = width.max(-1, keepdims=True).astype(np.float16) / np.float16(largest)
    whole = _divide(width, np.float32(scale)).round().clip(0, largest).astype(int)
    return scale, whole, np.float32(scale) * whole


def _pack_q2_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    least = -groups.min(-1).clip(max=0)
    scale, scales, width = _split_width((groups.max(-1).clip(min=0) + least) / 3, 15)
    step, steps, least = _split_width(least, 15)
    shifted = groups + least[..., None]
    codes = _divide(shifted, np.broadcast_to(width[..., None], shifted.shape)).round().clip(0, 3).astype(int)
    pairs = codes.reshape(-1, 2, 4, 32) << np.arange(0, 8, 2)[:, None]
    parts = [scales | steps << 4, pairs.sum(2).reshape(-1, 64), _half(scale), _half(step)]
    return np.concatenate([part.astype(np.uint8) for part in parts], -1)


def _pack_q3_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scale, scales, width = _split_width(np.abs(groups).max(-1) / 4, 31)
    codes = _divide(groups, np.broadcast_to(width[..., None], groups.shape)).round().clip(-4, 3).astype(int)
    codes, scales = codes + 4, scales + 32
    third = (codes.reshape(-1, 8, 32) >> 2 << np.arange(8)[:, None]).sum(1)
    pairs = ((codes & 3).reshape(-1, 2, 4, 32) << np.arange(0, 8, 2)[:, None]).sum(2)
    low = scales[:, :8] & 15 | (scales[:, 8:] & 15) << 4
    high = (scales.reshape(-1, 4, 4) >> 4 << np.arange(0, 8, 2)[:, None]).sum(1)
    parts = [third, pairs.reshape(-1, 64), low, high, _half(scale)]
    return np.concatenate([part.astype(np.uint8) for part in parts], -1)


def _nearest(groups: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Bytes of the 4-bit codes whose numbers times width are nearest, [blocks, 16 a group]."""
    scaled = _divide(groups, np.broadcast_to(width[..., None], groups.shape))
    codes = np.abs(scaled[..., None] - np.array(IQ4_CODES)).argmin(-1)
    return _nibbles(codes.reshape(len(codes), -1), 16)


def _pack_iq4_nl(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 1, 32)
    scale = (np.abs(groups).max(-1) / 127).astype(np.float16)
    return np.concatenate([_half(scale), _nearest(groups, np.float32(scale))], -1)


def _pack_iq4_xs(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    scale, scales, width = _split_width(np.abs(groups).max(-1) / 127, 31)
    scales += 32
    high = (scales.reshape(-1, 2, 4) >> 4 << np.arange(0, 8, 2)).sum(-1)
    low = scales[:, ::2] & 15 | (scales[:, 1::2] & 15) << 4
    parts = [_half(scale), high, low, _nearest(groups, width)]
    return np.concatenate([part.astype(np.uint8) for part in parts], -1)


PACKERS = {
    "Q4_K": lambda blocks: _pack_with_minimum(blocks, 4),
    "Q5_K": lambda blocks: _pack_with_minimum(blocks, 5),
    "Q6_K": _pack_q6_k,
    "Q2_K": _pack_q2_k,
    "Q3_K": _pack_q3_k,
    "IQ4_NL": _pack_iq4_nl,
    "IQ4_XS": _pack_iq4_xs,
}
