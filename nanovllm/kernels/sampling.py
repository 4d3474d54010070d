"""Drawing a token from softmax(logits / temperature) without computing the softmax (the Gumbel-max trick).

argmax(logits / temperature + Gumbel noise) has exactly that distribution. The noise is a hash of the row's
seed, its position and the token id: a request's tokens do not depend on its neighbours, and a rank that holds
a shard of the vocabulary draws the same noise for it as a single rank would, so shards compare their maxima.
"""

import torch
from torch import Tensor

from nanovllm.kernels.runtime import (
    INTERPRETED,
    NUM_COUNTERS,
    arrival_counters,
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    tl,
    triton,
    use_triton,
)

BLOCK = 2048
PROGRAMS_PER_MULTIPROCESSOR = 8
TWIN_ELEMENTS = 1 << 19
# The public-domain hash lowbias32; its second factor as the signed integer that int32 tensors hold.
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
SALTS = (0x1B873593, 0x2545F491)


def sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, vocab_start: int = 0
) -> tuple[Tensor, Tensor]:
    """The drawn token of each row and the score it won with: (float32 [batch], int64 [batch]).

    logits is [batch, vocabulary or a shard of it that begins at vocab_start]. temperatures float32 [batch],
    where 0 is greedy; seeds and positions int64 [batch]. Equal scores go to the lowest token id.
    """
    if not use_triton(logits):
        return sample_torch(logits, temperatures, seeds, positions, vocab_start)
    batch, vocab = logits.shape
    num_tiles = cdiv(vocab, BLOCK)
    tiles = max(1, num_tiles * batch // (PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(logits.device)))
    chunks = cdiv(num_tiles, tiles)
    values = torch.empty(batch, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(batch, dtype=torch.int64, device=logits.device)
    chunk_values = torch.empty(batch, chunks, dtype=torch.float32, device=logits.device)
    chunk_ids = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    assert batch <= NUM_COUNTERS
    if batch:
        _sample_kernel[(chunks, batch)](
            logits,
            temperatures,
            seeds,
            positions,
            values,
            token_ids,
            chunk_values,
            chunk_ids,
            arrival_counters(logits.device),
            logits.stride(0),
            vocab,
            vocab_start,
            tiles,
            BLOCK=BLOCK,
            CHUNKS_PAD=next_power_of_2(num_tiles),
            SALT_1=SALTS[0],
            SALT_2=SALTS[1],
            FAST=not INTERPRETED,
            num_warps=8,
        )
    return values, token_ids


def sample_torch(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, vocab_start: int = 0
) -> tuple[Tensor, Tensor]:
    greedy, noisy = (temperatures <= 0).nonzero().flatten(), (temperatures > 0).nonzero().flatten()
    if not len(noisy):
        values, token_ids = logits.max(dim=-1)
        return values.float(), token_ids + vocab_start
    values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    values[greedy], token_ids[greedy] = logits[greedy].float().max(dim=-1)
    # A few rows at a time, so that the passes over them stay in the processor's cache.
    for rows in noisy.split(max(1, TWIN_ELEMENTS // logits.shape[1])):
        scores = logits[rows].float().mul_(temperatures[rows].reciprocal()[:, None])
        scores -= _minus_noise(seeds[rows], positions[rows], vocab_start, logits.shape[1])
        values[rows], token_ids[rows] = scores.max(dim=-1)
    return values, token_ids + vocab_start


def _minus_noise(seeds: Tensor, positions: Tensor, vocab_start: int, vocab: int) -> Tensor:
    """log(-log(u)), float32 [rows, vocab], for u evenly spread over the middles of 2^23 steps of (0, 1).

    With 24 bits the largest u would round to 1 in float32 and its noise to infinity.
    """
    multiplier, offset = _row_keys(seeds, positions)
    token = torch.arange(vocab_start, vocab_start + vocab, dtype=torch.int32, device=seeds.device)
    bits = _mix((token * multiplier[:, None]).add_(offset[:, None]))
    u = bits.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return u.log_().neg_().log_()


def _row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys for each row, the first odd, from 64-bit seeds and positions."""
    keys = []
    for salt in SALTS:
        key = _mix(seeds.to(torch.int32) ^ salt)
        key = _mix(key ^ (seeds >> 32).to(torch.int32))
        key = _mix(key ^ positions.to(torch.int32))
        keys.append(_mix(key ^ (positions >> 32).to(torch.int32)))
    return keys[0] | 1, keys[1]


def _mix(x: Tensor) -> Tensor:
    """Hash an int32 tensor in place. Products wrap; a mask turns the arithmetic shift into a logical one."""
    shifted = torch.empty_like(x)
    for shift, factor in ((16, MIX_1), (15, MIX_2), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x ^= shifted.bitwise_and_((1 << (32 - shift)) - 1)
        if factor != 1:
            x *= factor
    return x


@triton.jit
def _mix_kernel(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _row_key_kernel(seed, position, salt: tl.constexpr):
    key = _mix_kernel(seed.to(tl.uint32) ^ salt)
    key = _mix_kernel(key ^ (seed >> 32).to(tl.uint32))
    key = _mix_kernel(key ^ position.to(tl.uint32))
    return _mix_kernel(key ^ (position >> 32).to(tl.uint32))


@triton.jit
def _gumbel_kernel(bits, FAST: tl.constexpr):
    u = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    if FAST:
        # The GPU's own logarithm is exact enough except near 1, where -log(1 - rest) needs its series.
        rest = 1.0 - u
        series = rest * (1.0 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5)))))
        exponential = tl.where(rest < 0.1, series, -0.6931471805599453 * _log2_kernel(u))
        return -0.6931471805599453 * _log2_kernel(exponential)
    else:
        return -tl.log(-tl.log(u))


@triton.jit
def _log2_kernel(x):
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["vocab_start", "tiles"])
def _sample_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    values,
    token_ids,
    chunk_values,
    chunk_ids,
    counters,
    row_stride,
    vocab,
    vocab_start,
    tiles,
    BLOCK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    SALT_1: tl.constexpr,
    SALT_2: tl.constexpr,
    FAST: tl.constexpr,
):
    """A program takes a chunk (`tiles` tiles) of a row; the last of a row's programs picks the best chunk."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    multiplier = _row_key_kernel(seed, position, SALT_1) | 1
    offset = _row_key_kernel(seed, position, SALT_2)
    begin = chunk * tiles * BLOCK
    end = tl.minimum(begin + tiles * BLOCK, vocab)
    lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_column = tl.zeros([BLOCK], tl.int32) + begin
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        address = logits + row.to(tl.int64) * row_stride + column
        score = tl.load(address, mask=column < end, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            bits = _mix_kernel((column + vocab_start).to(tl.uint32) * multiplier + offset)
            score = score * (1.0 / temperature) + _gumbel_kernel(bits, FAST)
        better = score > lane_best
        lane_best = tl.where(better, score, lane_best)
        lane_column = tl.where(better, column, lane_column)
    best = tl.max(lane_best, axis=0)
    winner = tl.min(tl.where(lane_best == best, lane_column, vocab), axis=0)

    chunks = tl.num_programs(0)
    tl.store(chunk_values + row * chunks + chunk, best)
    tl.store(chunk_ids + row * chunks + chunk, winner)
    tl.debug_barrier()  # both stores come before the arrival that announces them
    if tl.atomic_add(counters + row, 1) == chunks - 1:
        tl.store(counters + row, 0)
        index = tl.arange(0, CHUNKS_PAD)
        candidates = tl.load(chunk_values + row * chunks + index, mask=index < chunks, other=float("-inf"))
        ids = tl.load(chunk_ids + row * chunks + index, mask=index < chunks, other=vocab)
        best = tl.max(candidates, axis=0)
        winner = tl.min(tl.where(candidates == best, ids, vocab), axis=0)
        tl.store(values + row, best)
        tl.store(token_ids + row, winner.to(tl.int64) + vocab_start)
