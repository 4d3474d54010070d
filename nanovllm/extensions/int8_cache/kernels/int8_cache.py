"""Pages of the 8-bit KV cache: how they are laid out, and how vectors become bytes and are read again.

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

from nanovllm.kernels.runtime import IS_INTERPRETED, cdiv, on_default_stream, tl, triton

SCALE_BYTES = 4  # of a key and a value
BIAS = 128
LARGEST = 127
TILE = 16  # tokens; every block has a whole number of tiles
SMALLEST = 1e-30  # scale; vectors of less are stored as 0, before quotients overflow


def page_sizes(cache: Tensor, head_dim: int) -> tuple[int, int]:
    """block_size and kv_heads of a layer's cache."""
    return cache.shape[2] // (2 * head_dim + SCALE_BYTES), cache.shape[1]


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
    with on_default_stream(device):
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
    """Quantise and store key and value [tokens, kv_heads, head_dim] in slots [tokens], unless they are -1."""
    written = slots >= 0
    key, value, slots = key[written], value[written], slots[written].long()
    block_size, _ = page_sizes(cache, key.shape[-1])
    block, token = slots // block_size, slots % block_size
    keys, values, scales = _parts(cache, key.shape[-1])
    at = block, slice(None), token // TILE, token % TILE
    keys[at], k_scales = quantize(key)
    values.mT[at], v_scales = quantize(value)
    scales[at] = torch.stack((k_scales, v_scales), dim=-1)


def read_tokens(
    cache: Tensor, block_table: Tensor, begin: int, end: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """`CacheLayout.read` of 8-bit pages: keys and values are float32."""
    block_size, _ = page_sizes(cache, head_dim)
    blocks = block_table[begin // block_size : cdiv(end, block_size)]
    keys, values, scales = _parts(cache.index_select(0, blocks), head_dim)
    keys, values, scales = (
        part.transpose(0, 1).flatten(1, 3).narrow(1, begin % block_size, end - begin)
        for part in (keys, values.mT, scales)
    )
    return dequantize(keys, scales[..., 0]), dequantize(values, scales[..., 1])


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
def load_dequantised(cache, start, len_k, inside, DTYPE, SIZES, MASKED):
    """What `load_rows` does, out of 8-bit pages."""
    head, _, table, block_stride, _ = cache
    key, value, key_scale, value_scale = load_int8_tile(
        head, block_stride, table, start, len_k, SIZES, SIZES.KEY_TILE, False
    )
    if MASKED:
        value_scale = tl.where(inside, value_scale, 0.0)
    key = tl.trans(dequantize_tile(key, key_scale[:, None]).to(DTYPE))
    value = tl.trans(dequantize_tile(value, value_scale[None, :]).to(DTYPE))
    return key, value


@triton.jit
def load_int8_tile(head, block_stride, table, start, end, SIZES, TILE, BY_GROUPS):
    """
    The bytes of keys [TILE, DIM_PAD] and values [DIM_PAD, TILE] from `start` on, a multiple of TILE, and both
    scales [TILE], of the head that begins at `head` in block 0. Behind `end` the last token, or another one
    of its 16, is repeated. BY_GROUPS reads the values of 16 tokens as one piece of memory, which is fastest
    where values are the left factor of a product; as the right factor they would have to be rearranged. Else
    there may be a table for each token, and another one from a multiple of 16 on.
    """
    HEAD_DIM: tl.constexpr = SIZES.HEAD_DIM
    DIM_PAD: tl.constexpr = SIZES.DIM_PAD
    BLOCK_SIZE: tl.constexpr = SIZES.BLOCK_SIZE
    dim = tl.arange(0, DIM_PAD)
    token = tl.minimum(start + tl.arange(0, TILE), end - 1)
    first = tl.minimum(start + tl.arange(0, TILE // 16) * 16, (end - 1) // 16 * 16)  # of each 16
    if BLOCK_SIZE % TILE == 0:  # the whole tile is in one block
        page = head + tl.load(table + start // BLOCK_SIZE).to(tl.int64) * block_stride
        first_page = page
        place, first = token - start // BLOCK_SIZE * BLOCK_SIZE, first - start // BLOCK_SIZE * BLOCK_SIZE
    else:
        page = head + tl.load(table + token // BLOCK_SIZE).to(tl.int64) * block_stride
        if BY_GROUPS:
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
