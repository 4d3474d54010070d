"""The 8-bit KV cache: how its pages are laid out, and how vectors become bytes and are read again.

A layer's `k_cache` and `v_cache` are one tensor, uint8 [blocks, kv_heads, block_size * (2 * head_dim + 4)].
Of each head a block has its keys' bytes [block_size, head_dim], its values' bytes
[block_size / 16, head_dim, 16] and its scales, bfloat16 [block_size, 2], of a token's key and of its value:
value = (byte - 128) * scale. Scales are made when a token is stored, so there is nothing to calibrate, and
bfloat16 has the range of the model's numbers, so that no vector is too large or too small. Values are
multiplied along tokens, and a GPU's matrix unit cannot transpose bytes on their way: so 16 tokens stand side
by side. (More would scatter the bytes of a token that is stored over more memory.) The bias of 128 lets a
byte permutation make float16 numbers of them, where a conversion would cost more, and both scales of a token
are one word.

K is sensitive, through the few channels that are large in some models. So q and K are rotated by a Hadamard
matrix, which spreads each channel over many and leaves the products of q and K what they were.
"""

import functools

import torch
from torch import Tensor

from nanovllm.kernels.runtime import IS_INTERPRETED, cdiv, tl, triton

SCALE_BYTES = 4  # of a key and a value
BIAS = 128
LARGEST = 127
TILE = 16  # tokens; every block has a whole number of tiles
SMALLEST = 1e-30  # scale; vectors of less are stored as 0, before quotients overflow
SMALLEST_SCALE = tl.constexpr(SMALLEST)


def page_shape(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of a layer's block, for a cache of any dtype: [planes, ...]. Keys and values are planes, or one."""
    if dtype == torch.uint8:
        return 1, kv_heads, block_size * (2 * head_dim + SCALE_BYTES)
    return 2, block_size, kv_heads, head_dim


def is_int8(cache: Tensor) -> bool:
    return cache.dtype == torch.uint8


def page_sizes(cache: Tensor, head_dim: int) -> tuple[int, int]:
    """block_size and kv_heads of a cache of any dtype."""
    if is_int8(cache):
        return cache.shape[2] // (2 * head_dim + SCALE_BYTES), cache.shape[1]
    return cache.shape[1], cache.shape[2]


def hadamard_rotate(x: Tensor) -> Tensor:
    """
    Each head of x [..., head_dim] times an orthonormal Hadamard matrix: the one of size 2 mixes the halves
    that rotary embedding pairs, and one of the largest power of two that divides half a head mixes blocks
    inside them. If head_dim is a power of two, that is Sylvester's matrix. float32.
    """
    half = x.shape[-1] // 2
    size = half & -half
    parts = x.float().unflatten(-1, (2, -1, size)) @ _hadamard(size, x.device)
    first, second = parts.unbind(-3)
    return torch.stack((first + second, first - second), dim=-3).flatten(-3) / 2**0.5


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
    steps = scales.float().masked_fill(scales <= SMALLEST, float("inf"))[..., None]
    return ((x / steps).round().clamp(-LARGEST, LARGEST) + BIAS).to(torch.uint8), scales


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """float32, in the shape of `values`."""
    return values.float().sub_(BIAS).mul_(scales.float()[..., None])


def as_stored(x: Tensor) -> Tensor:
    """What the cache holds of x [..., head_dim]: float32."""
    return dequantize(*quantize(x))


def store_int8_torch(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Quantise and store key and value [tokens, kv_heads, head_dim] in slots [tokens], all at least 0."""
    block_size, _ = page_sizes(cache, key.shape[-1])
    block, token = slots // block_size, slots % block_size
    keys, values, scales = _parts(cache, key.shape[-1])
    at = block, slice(None), token // TILE, token % TILE
    keys[at], k_scales = quantize(key)
    values.mT[at], v_scales = quantize(value)
    scales[at] = torch.stack((k_scales, v_scales), dim=-1)


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
        return *_read_tiles(k_cache, blocks, place, seen, head_dim), seen
    slots = (blocks * block_size + place).flatten()
    keys, values = (
        cache.view(-1, kv_heads, head_dim).index_select(0, slots).unflatten(0, place.shape)
        for cache in (k_cache, v_cache)
    )
    return keys.transpose(1, 2), values.transpose(1, 2), seen


def read_sequence(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, begin: int, end: int
) -> tuple[Tensor, Tensor]:
    """
    Keys and values [1, kv_heads, tokens, head_dim] of one sequence's tokens begin..end, for caches that are
    not 8-bit. Where the blocks lie side by side, they are not copied.
    """
    _, block_size, *head_sizes = k_cache.shape
    blocks = block_table[begin // block_size : cdiv(end, block_size)]
    numbers = blocks.tolist()
    first = numbers[0] if numbers else 0
    if numbers != [*range(first, first + len(numbers))]:
        k_cache, v_cache, first = k_cache.index_select(0, blocks), v_cache.index_select(0, blocks), 0
    keys, values = k_cache.view(1, -1, *head_sizes), v_cache.view(1, -1, *head_sizes)
    span = first * block_size + begin % block_size, end - begin
    return keys.narrow(1, *span).transpose(1, 2), values.narrow(1, *span).transpose(1, 2)


def _read_tiles(
    cache: Tensor, blocks: Tensor, tiles: Tensor, seen: Tensor, head_dim: int
) -> tuple[Tensor, Tensor]:
    """
    Keys and values, float32 [batch, kv_heads, tokens, head_dim], of tiles [batch, tiles] of these blocks.
    Tokens that are not `seen` become 0: their bytes may be anything.
    """
    at = blocks[:, None], torch.arange(cache.shape[1], device=blocks.device)[:, None], tiles[:, None]
    word = torch.complex128  # 16 bytes: single ones would take far longer
    keys, values, scales = (
        part.flatten(3).view(word)[at].view(part.dtype).unflatten(3, part.shape[3:])
        for part in _parts(cache, head_dim)
    )
    scales = scales.float().masked_fill(~seen.unflatten(1, (-1, TILE))[:, None, :, :, None], 0.0)
    keys = keys.float().sub_(BIAS).mul_(scales[..., :1])
    values = values.float().sub_(BIAS).mul_(scales[..., None, :, 1])
    return keys.flatten(2, 3), values.mT.flatten(2, 3)


def _parts(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Views of the bytes of keys [blocks, kv_heads, tiles, 16, head_dim] and of values [blocks, kv_heads, tiles,
    head_dim, 16], and of the scales, bfloat16 [blocks, kv_heads, tiles, 16, 2].
    """
    block_size, _ = page_sizes(cache, head_dim)
    sizes = block_size * head_dim, block_size * head_dim, block_size * SCALE_BYTES
    keys, values, scales = cache.split(sizes, dim=-1)
    keys, values = keys.unflatten(2, (-1, TILE, head_dim)), values.unflatten(2, (-1, head_dim, TILE))
    return keys, values, scales.view(torch.bfloat16).unflatten(2, (-1, TILE, 2))


@triton.jit
def load_int8_tile(
    head, block_stride, table, start, end,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    BY_GROUPS: tl.constexpr,
):  # fmt: skip
    """
    The bytes of keys [TILE, DIM_PAD] and values [DIM_PAD, TILE] from `start` on, a multiple of TILE, and both
    scales [TILE], of the head that begins at `head` in block 0. Behind `end` the last token, or another one
    of its 16, is repeated. BY_GROUPS reads the values of 16 tokens as one piece of memory, which is fastest
    where values are the left factor of a product; as the right factor they would have to be rearranged.
    """
    dim = tl.arange(0, DIM_PAD)
    token = tl.minimum(start + tl.arange(0, TILE), end - 1)
    first = tl.minimum(start + tl.arange(0, TILE // 16) * 16, (end - 1) // 16 * 16)  # of each 16
    if BLOCK_SIZE % TILE == 0:  # the whole tile is in one block
        page = head + tl.load(table + start // BLOCK_SIZE).to(tl.int64) * block_stride
        first_page = page
        place, first = token - start // BLOCK_SIZE * BLOCK_SIZE, first - start // BLOCK_SIZE * BLOCK_SIZE
    else:
        page = head + tl.load(table + token // BLOCK_SIZE).to(tl.int64) * block_stride
        first_page = head + tl.load(table + first // BLOCK_SIZE).to(tl.int64) * block_stride
        place, first = token % BLOCK_SIZE, first % BLOCK_SIZE
    is_dim = dim < HEAD_DIM
    rows = (page + place * HEAD_DIM)[:, None] + dim[None, :]
    if HEAD_DIM == DIM_PAD:
        key = tl.load(rows)
    else:
        key = tl.load(rows, mask=is_dim[None, :], other=0)
    if BY_GROUPS:
        byte = tl.arange(0, 16 * DIM_PAD)
        groups = (first_page + (BLOCK_SIZE + first) * HEAD_DIM)[:, None] + byte[None, :]
        if HEAD_DIM == DIM_PAD:
            value = tl.load(groups)
        else:
            value = tl.load(groups, mask=(byte < 16 * HEAD_DIM)[None, :], other=0)
        value = tl.permute(tl.reshape(value, [TILE // 16, DIM_PAD, 16]), [1, 0, 2])
        value = tl.reshape(value, [DIM_PAD, TILE])
    else:
        place16 = (start + tl.arange(0, TILE)) % BLOCK_SIZE
        columns = page + (BLOCK_SIZE + place16 // 16 * 16) * HEAD_DIM + place16 % 16
        columns = tl.max_contiguous(tl.multiple_of(columns, 16), 16)[None, :] + dim[:, None] * 16
        if HEAD_DIM == DIM_PAD:
            value = tl.load(columns)
        else:
            value = tl.load(columns, mask=is_dim[:, None], other=0)
    both = tl.load((page + 2 * BLOCK_SIZE * HEAD_DIM + place * 4).to(tl.pointer_type(tl.uint32)))
    key_scale = (both << 16).to(tl.float32, bitcast=True)
    value_scale = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    return key, value, key_scale, value_scale


@triton.jit
def widen(byte):
    """1024 + byte in float16, whose bits are 0x6400 + byte: a permutation of bytes makes two of them."""
    if IS_INTERPRETED:
        return byte.to(tl.float16) + 1024.0
    asm: tl.constexpr = "prmt.b32 $0, $2, 0x64646464, 0x4140; prmt.b32 $1, $2, 0x64646464, 0x4342;"
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [byte], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def dequantize_tile(byte, scale):
    """float32; bytes and scales can be broadcast."""
    return (widen(byte) - 1152.0).to(tl.float32) * scale


@triton.jit
def quantize_halves(half1, half2):
    """The bytes of both halves [rows, dims] of vectors, their scale [rows, 1], and what they stand for."""
    peak = tl.maximum(tl.max(tl.abs(half1), axis=1), tl.max(tl.abs(half2), axis=1))
    scale = (peak / 127.0).to(tl.bfloat16)[:, None]
    step = scale.to(tl.float32)
    inverse = tl.where(step > SMALLEST_SCALE, 1.0 / step, 0.0)
    whole1, whole2 = _round(half1 * inverse), _round(half2 * inverse)
    byte1, byte2 = (whole1 + 128.0).to(tl.uint8), (whole2 + 128.0).to(tl.uint8)
    return byte1, byte2, scale, whole1 * step, whole2 * step


@triton.jit
def _round(x):
    """To the nearest whole number from -127 to 127: float32 has no place for fractions beside 1.5 * 2^23."""
    x = (x + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(x, -127.0), 127.0)


@triton.jit
def rotate_halves(half1, half2, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """`hadamard_rotate` of vectors whose halves are [ROWS, WIDTH], mixing 2 ** STAGES dims of each half."""
    norm = tl.rsqrt(tl.full([1, 1], 2.0 * (1 << STAGES), tl.float32))
    half1, half2 = (half1 + half2) * norm, (half1 - half2) * norm
    return _butterflies(half1, ROWS, WIDTH, STAGES), _butterflies(half2, ROWS, WIDTH, STAGES)


@triton.jit
def _butterflies(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, [ROWS, WIDTH // (2 << stage), 2, 1 << stage])
        first, second = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
        pairs = tl.permute(tl.join(first + second, first - second), [0, 1, 3, 2])
        x = tl.reshape(pairs, [ROWS, WIDTH])
    return x


@triton.jit
def scale_to_float16(query, scale_log2):
    """
    Queries [DIM_PAD, columns] in float16 for a product with widened keys, what scores are to be multiplied by
    [1, columns], and what the product begins with [columns], since each widened value is 1152 too large.
    """
    query = query.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(query), axis=0), 1.0e-30)
    query = (query / largest[None, :]).to(tl.float16)
    return query, (largest * scale_log2)[None, :], -1152.0 * tl.sum(query.to(tl.float32), axis=0)


@triton.jit
def fast_log2(x):
    """-inf for 0. A single instruction, where `tl.log2` is a polynomial."""
    if IS_INTERPRETED:
        return tl.log2(x)
    asm: tl.constexpr = "lg2.approx.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def larger_of_each(a1, a2, b1, b2):
    """For `tl.reduce` of two tensors at once."""
    return tl.maximum(a1, b1), tl.maximum(a2, b2)
