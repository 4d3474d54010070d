"""Drawing a token from softmax(logits / temperature) without computing the softmax (the Gumbel-max trick).

argmax(logits / temperature + Gumbel noise) has exactly that distribution. The noise is a hash of the row's
seed, its position and the token id. So a request's tokens do not depend on its neighbours, and the noise of a
token is the same on a rank that holds a shard of the vocabulary: the best of all shards is what a single rank
draws.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.runtime import (
    IS_INTERPRETED,
    LOG2_E,
    MINUS_INF,
    arrival_counters,
    cdiv,
    next_power_of_2,
    num_multiprocessors,
    tl,
    triton,
    use_triton,
)

BLOCK = 1024
PROGRAMS_PER_MULTIPROCESSOR = 24  # several waves, so that all multiprocessors end at about the same time
REFERENCE_ELEMENTS = 1 << 19  # logits that sample_torch works on at once: few enough for a CPU's cache
UNIT = tl.constexpr(LOG2_E)  # of scores with noise
SALT_1, SALT_2 = tl.constexpr(0x1B873593), tl.constexpr(0x2545F491)  # make the two keys of a row differ
# The public-domain hash lowbias32 shifts and multiplies twice and shifts once more. The last shift only
# improves the low bits, so it is left out where those are dropped.
FACTOR_1, FACTOR_2 = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)


def sample(logits: Tensor, step: Any) -> tuple[Tensor, Tensor]:
    """The drawn token of each row and the score it won with: (float32 [batch], int64 [batch]).

    logits is [batch, vocabulary or a shard of it that begins at step.vocab_start]; `step` is a SamplingStep
    (layers/sampler.py). Of equal scores the lowest token id wins. Scores with noise are log2(e) times those
    of the formula, because the GPU's logarithm has base 2.
    """
    if not use_triton(logits):
        return sample_torch(logits, step)
    batch, vocab = logits.shape
    num_tiles = cdiv(vocab, BLOCK)
    num_programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(logits.device)
    tiles_per_chunk = max(1, num_tiles * batch // num_programs)
    chunks = cdiv(num_tiles, tiles_per_chunk)
    values, token_ids = torch.empty_like(step.temperatures), torch.empty_like(step.seeds)
    chunk_values = values.new_empty(batch, chunks)
    chunk_ids = values.new_empty(batch, chunks, dtype=torch.int32)
    _sample_kernel[(chunks, batch)](
        logits,
        step.temperatures,
        step.seeds,
        step.positions,
        step.lowest,
        values,
        token_ids,
        chunk_values,
        chunk_ids,
        arrival_counters(logits.device),
        logits.stride(0),
        vocab,
        step.vocab_start,
        tiles_per_chunk,
        BLOCK=BLOCK,
        CHUNKS_PAD=next_power_of_2(num_tiles),
    )
    return values, token_ids


def sample_torch(logits: Tensor, step: Any) -> tuple[Tensor, Tensor]:
    temperatures, vocab = step.temperatures, logits.shape[1]
    if step.lowest is not None:
        logits = logits.masked_fill(logits.float() < step.lowest[:, None], -torch.inf)
    best, token_ids = logits.max(dim=-1)
    values = best.float()
    noisy = (temperatures > 0).nonzero().flatten()
    first = step.vocab_start
    for rows in noisy.split(max(1, REFERENCE_ELEMENTS // vocab)) if len(noisy) else ():
        seeds, positions = step.seeds[rows, None], step.positions[rows, None].long()
        multiplier = _row_key(seeds, positions, SALT_1) | 1
        offset = _row_key(seeds, positions, SALT_2)
        token = torch.arange(first, first + vocab, dtype=torch.int32, device=logits.device)
        bits = _two_rounds((token * multiplier).add_(offset))
        # (0, 1) is cut into 2^23 equal steps, and u is the middle of one. With 24 bits the largest u would
        # round to 1 in float32, and its noise would be infinite.
        u = bits.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
        scores = logits[rows].float().mul_((temperatures[rows].reciprocal() * LOG2_E)[:, None])
        scores -= u.log2_().neg_().log2_()
        values[rows], token_ids[rows] = scores.max(dim=-1)
    return values, token_ids + first


def _row_key(seeds: Tensor, positions: Tensor, salt: Any) -> Tensor:
    """An int32 key for each row, from 64-bit seeds and positions."""
    key = int(salt)
    for word in (seeds, seeds >> 32, positions, positions >> 32):
        key = _two_rounds(word.int() ^ key)
        key ^= (key >> 16).bitwise_and_(0xFFFF)
    return key


def _two_rounds(x: Tensor) -> Tensor:
    """
    Hash an int32 tensor in place. Products wrap, by factors as signed integers; masks turn the arithmetic
    shifts into logical ones.
    """
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= int(FACTOR_1)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= int(FACTOR_2) - (1 << 32)
    return x


@triton.jit
def _two_rounds_kernel(x):
    x ^= x >> 16
    x *= FACTOR_1
    x ^= x >> 15
    return x * FACTOR_2


@triton.jit
def _row_key_kernel(seed, position, key):
    words = seed, seed >> 32, position, position >> 32
    for i in tl.static_range(4):
        key = _two_rounds_kernel(words[i].to(tl.uint32) ^ key)
        key ^= key >> 16
    return key


@triton.jit
def _minus_noise_kernel(bits):
    if IS_INTERPRETED:
        u = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
        return tl.log2(-tl.log2(u))
    # In few instructions: `shf` makes the top bits the fraction of a number between 1 and 2, whose exponent
    # is 0x7f, and the logarithm is the GPU's own. Near 1 that is not exact enough: a polynomial computes
    # -log2(1 - rest) there.
    asm: tl.constexpr = "shf.r.wrap.b32 $0, $1, 0x7f, 9;"
    from_1_to_2 = tl.inline_asm_elementwise(asm, "=f,r", [bits], tl.float32, is_pure=True, pack=1)
    u = from_1_to_2 - (1.0 - 2.0**-24)
    rest = 1.0 - u
    near_1 = rest * (1.442695 + rest * (0.72136723 + rest * (0.47934103 + rest * 0.39956718)))
    return _log2_kernel(tl.where(rest < 0.0625, near_1, -_log2_kernel(u)))


@triton.jit
def _log2_kernel(x):
    asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["vocab_start", "tiles_per_chunk"])
def _sample_kernel(
    logits, temperatures, seeds, positions, lowest,
    values, token_ids, chunk_values, chunk_ids, counters,
    row_stride, vocab, vocab_start, tiles_per_chunk,
    BLOCK: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """A program searches a chunk of a row; the last of a row's programs picks the best chunk."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.int64)
    multiplier = _row_key_kernel(seed, position, SALT_1) | 1
    offset = _row_key_kernel(seed, position, SALT_2)
    begin = chunk * tiles_per_chunk * BLOCK
    end = tl.minimum(begin + tiles_per_chunk * BLOCK, vocab)
    lane_best = tl.full([BLOCK], MINUS_INF, tl.float32)
    lane_start = tl.zeros([BLOCK], tl.int32) + begin
    threshold = tl.load(lowest + row) if lowest is not None else 0.0
    scale = 1.0 / (temperature if temperature > 0 else 1.0) * UNIT
    for start in tl.range(begin, end, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        address = logits + row.to(tl.int64) * row_stride + column
        score = tl.load(address, mask=column < end, other=MINUS_INF).to(tl.float32)
        if lowest is not None:
            score = tl.where(score < threshold, MINUS_INF, score)
        if temperature > 0:
            bits = _two_rounds_kernel((column + vocab_start).to(tl.uint32) * multiplier + offset)
            score = score * scale - _minus_noise_kernel(bits)
        better = score > lane_best
        lane_best = tl.where(better, score, lane_best)
        lane_start = tl.where(better, start, lane_start)
    best = tl.max(lane_best, axis=0)
    winner = tl.min(tl.where(lane_best == best, lane_start + tl.arange(0, BLOCK), vocab), axis=0)

    chunks = tl.num_programs(0)
    chunk_values += row * chunks
    chunk_ids += row * chunks
    tl.store(chunk_values + chunk, best)
    tl.store(chunk_ids + chunk, winner)
    tl.debug_barrier()  # both values are stored before the counter says so
    if tl.atomic_add(counters + row, 1) == chunks - 1:
        tl.store(counters + row, 0)
        index = tl.arange(0, CHUNKS_PAD)
        candidates = tl.load(chunk_values + index, mask=index < chunks, other=MINUS_INF)
        ids = tl.load(chunk_ids + index, mask=index < chunks, other=vocab)
        best = tl.max(candidates, axis=0)
        winner = tl.min(tl.where(candidates == best, ids, vocab), axis=0)
        tl.store(values + row, best)
        tl.store(token_ids + row, winner.to(tl.int64) + vocab_start)
