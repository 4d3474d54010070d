"""The 8-bit KV cache: how its pages are laid out, and how vectors become bytes and are read again.

A layer's `k_cache` and `v_cache` are uint8 [blocks, kv_heads, block_size * (head_dim + 2)]. A block has of
each head its tokens' bytes and behind them a bfloat16 scale of each token: value = (byte - 128) * scale.
Scales are made when a token is stored, so there is nothing to calibrate; bfloat16 has the range of the
model's numbers, so that no vector is too large or too small. K's bytes are [block_size, head_dim]. V's are
[head_dim, block_size], since they are multiplied along tokens and a GPU's matrix unit cannot transpose bytes
on their way. The bias of 128 lets a byte permutation make float16 numbers of them, where a conversion would
cost more.

K is sensitive, through the few channels that are large in some models. So q and K are rotated by a Hadamard
matrix, which spreads each channel over all of them and leaves the products of q and K what they were.
"""

import functools

import torch
from torch import Tensor

SCALE_BYTES = 2
BIAS = 128
LARGEST = 127
TILE = 16  # tokens: every block has a whole number of tiles
SMALLEST_SCALE = 1e-30  # vectors of less are stored as 0, before quotients overflow


def page_bytes(block_size: int, head_dim: int) -> int:
    """Of one head's keys or values in a block."""
    return block_size * (head_dim + SCALE_BYTES)


def page_shape(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of the keys or values of a block in a layer, for a cache of any dtype."""
    if dtype == torch.uint8:
        return kv_heads, page_bytes(block_size, head_dim)
    return block_size, kv_heads, head_dim


def is_int8(cache: Tensor) -> bool:
    return cache.dtype == torch.uint8


def page_sizes(cache: Tensor, head_dim: int) -> tuple[int, int]:
    """block_size and kv_heads of a cache of any dtype."""
    if is_int8(cache):
        return cache.shape[2] // page_bytes(1, head_dim), cache.shape[1]
    return cache.shape[1], cache.shape[2]


def hadamard_rotate(x: Tensor) -> Tensor:
    """
    Each head in x [..., head_dim] times the orthonormal Hadamard matrix in Sylvester's order; if head_dim is
    no power of two, in blocks of the largest one that divides it. float32.
    """
    size = x.shape[-1] & -x.shape[-1]
    return (x.float().unflatten(-1, (-1, size)) @ _hadamard(size, x.device)).flatten(-2)


@functools.cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix / size**0.5


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] as bytes of this shape, and scales, bfloat16 [...]."""
    x = x.float()
    scales = (x.abs().amax(-1) / LARGEST).bfloat16()
    steps = scales.float().masked_fill(scales < SMALLEST_SCALE, float("inf"))[..., None]
    return ((x / steps).round().clamp(-LARGEST, LARGEST) + BIAS).to(torch.uint8), scales


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """float32, in the shape of `values`."""
    return values.float().sub_(BIAS).mul_(scales.float()[..., None])


def as_stored(x: Tensor) -> Tensor:
    """What the cache holds of x [..., head_dim]: float32."""
    return dequantize(*quantize(x))


def store_int8_torch(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Quantise and store key and value [tokens, kv_heads, head_dim] in slots [tokens], all at least 0."""
    block_size, _ = page_sizes(k_cache, key.shape[-1])
    at = slots // block_size, slice(None), slots % block_size
    for (values, scales), new in zip(_parts(k_cache, v_cache, key.shape[-1]), (key, value), strict=True):
        values[at], scales[at] = quantize(new)


def read_tokens(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, begins: Tensor, ends: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """
    The tokens from begins to ends [batch] of sequences, for caches of any dtype: keys and values
    [batch, kv_heads, longest, head_dim], float32 if they were 8-bit, and which of these are such tokens, bool
    [batch, longest]. Before and behind them stands what does no harm under a mask.
    """
    block_size, kv_heads = page_sizes(k_cache, head_dim)
    unit = TILE if is_int8(k_cache) else 1  # tokens that are read at once
    first, last = begins // unit, (ends + unit - 1) // unit
    place = first[:, None] + torch.arange(int((last - first).max()), device=ends.device)
    token = (place[..., None] * unit + torch.arange(unit, device=ends.device)).flatten(1)
    seen = (token >= begins[:, None]) & (token < ends[:, None])
    # Places beyond a sequence's end read its first one instead, and those of an empty one block 0.
    place = torch.where(place < last[:, None], place, first[:, None])
    blocks = block_tables.gather(1, place // (block_size // unit))
    blocks = torch.where(ends[:, None] > begins[:, None], blocks, 0)
    place = place % (block_size // unit)
    if is_int8(k_cache):
        return *_read_tiles(k_cache, v_cache, blocks, place, seen, head_dim), seen
    slots = (blocks * block_size + place).flatten()
    keys, values = (
        cache.view(-1, kv_heads, head_dim).index_select(0, slots).unflatten(0, place.shape)
        for cache in (k_cache, v_cache)
    )
    return keys.transpose(1, 2), values.transpose(1, 2), seen


def _read_tiles(
    k_cache: Tensor, v_cache: Tensor, blocks: Tensor, tiles: Tensor, seen: Tensor, head_dim: int
) -> tuple[Tensor, ...]:
    """
    Keys and values, float32 [batch, kv_heads, tokens, head_dim], of tiles [batch, tiles] of these blocks.
    Tokens that are not `seen` become 0: their bytes may be anything.
    """
    (keys, k_scales), (values, v_scales) = _parts(k_cache, v_cache, head_dim)
    head = torch.arange(k_cache.shape[1], device=blocks.device)[:, None]
    at = blocks[:, None], head, tiles[:, None]
    # As words of 16 bytes, [blocks, kv_heads, tiles, head_dim]: single bytes would take far longer.
    keys = keys.unflatten(2, (-1, TILE)).flatten(3).view(torch.complex128)[at].view(torch.uint8)
    keys = keys.flatten(2).unflatten(2, (-1, head_dim))
    values = values.mT.view(torch.complex128).mT[at].mT.contiguous().view(torch.uint8).mT
    k_scales, v_scales = (
        scales.unflatten(2, (-1, TILE))[at].flatten(2).masked_fill(~seen[:, None], 0.0)
        for scales in (k_scales, v_scales)
    )
    return dequantize(keys, k_scales), dequantize(values, v_scales)


def _parts(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """
    Views of K and of V: bytes [blocks, kv_heads, block_size, head_dim], V's transposed in memory, and scales
    [blocks, kv_heads, block_size].
    """
    block_size, _ = page_sizes(k_cache, head_dim)
    sizes = block_size * head_dim, block_size * SCALE_BYTES
    (keys, k_scales), (values, v_scales) = (cache.split(sizes, dim=-1) for cache in (k_cache, v_cache))
    keys, values = keys.unflatten(2, (block_size, head_dim)), values.unflatten(2, (head_dim, block_size)).mT
    return (keys, k_scales.view(torch.bfloat16)), (values, v_scales.view(torch.bfloat16))
