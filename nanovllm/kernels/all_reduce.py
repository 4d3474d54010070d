"""Sums over the tensor-parallel ranks by GPUs that write into each other's memory, fused with what follows.

Each rank has a receive buffer that the others write into. An element that has not arrived is -0.0, which no
sender ever sends, so the data themselves say when they are there: no barrier, no flag, one trip over the
link. A reader puts the -0.0 back. Two calls in a row use different halves of the buffer: a rank that sends
for the third call has received everyone's second, so all of them are through with the first.
"""

import torch
from torch import Tensor

from nanovllm.kernels.layernorm import add_rms_norm_torch
from nanovllm.kernels.runtime import cdiv, next_power_of_2, overlap_options, tl, triton

HALF_BYTES = 64 << 20  # larger sums are computed part by part
TWO_HOPS_BYTES = 256 << 10  # from here on bytes weigh more than trips
SAMPLE_BLOCK = 128


class PeerMemory:
    """
    `buffer` is this rank's receive buffer, and `addresses` are where all ranks' are mapped in this process.
    Every rank makes the same calls in the same order, the last of each step a `best_token`, which is why a
    step may always begin with the first half (as one in a CUDA graph does).
    """

    def __init__(
        self,
        rank: int,
        addresses: list[int],
        buffer: Tensor,
        dtype: torch.dtype,
        max_num_seqs: int,
        half_bytes: int = HALF_BYTES,
    ):
        """`buffer` is int32 [num_words()]. To be called before any rank begins."""
        self.rank, self.size, self.max_num_seqs = rank, len(addresses), max_num_seqs
        self.turn = 0
        self.half = half_bytes // dtype.itemsize  # elements
        self.best_start = 2 * half_bytes // 4
        bits = torch.int32 if dtype.itemsize == 4 else torch.int16
        buffer[: self.best_start].view(bits).fill_(torch.iinfo(bits).min)
        buffer[self.best_start :].fill_(torch.iinfo(torch.int32).min)
        self.aborted = buffer[-1:].zero_()
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=buffer.device)
        if buffer.is_cuda:
            self._one = torch.ones(1, dtype=torch.int32).pin_memory()
            self._abort_stream = torch.cuda.Stream(buffer.device)
            torch.cuda.synchronize(buffer.device)

    @staticmethod
    def num_words(size: int, max_num_seqs: int, half_bytes: int = HALF_BYTES) -> int:
        """Two halves for activations, a score and a token of every rank and sequence, and `aborted`."""
        return 2 * half_bytes // 4 + 2 * size * max_num_seqs + 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x [rows, hidden]."""
        return self._run(x, None, None, 0.0)[1]

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Group.all_reduce_add_rms_norm`. Who is up to date with a row is the same for equal shapes."""
        return self._run(x, residual, weight, eps)

    def _run(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, hidden = x.shape
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        normed = None if weight is None else torch.empty_like(total)
        # A row's owner alone sums it up and sends the result: two trips, but fewer bytes with many ranks.
        two_hops = weight is not None and self.size > 2 and x.nbytes >= TWO_HOPS_BYTES
        most_rows = self.half // hidden // (2 if two_hops else self.size)
        most_rows -= most_rows % self.size
        block = next_power_of_2(hidden)
        for start in range(0, rows, most_rows):
            part = slice(start, min(start + most_rows, rows))
            _all_reduce_kernel[(part.stop - start,)](
                x[part],
                None if residual is None else residual[part],
                weight,
                None if normed is None else normed[part],
                total[part],
                self.addresses,
                self.aborted,
                self.turn * self.half,
                most_rows,
                eps,
                x.stride(0),
                hidden,
                RANK=self.rank,
                SIZE=self.size,
                TWO_HOPS=two_hops,
                BITS=tl.int32 if x.element_size() == 4 else tl.int16,
                NOTHING=-(1 << (8 * x.element_size() - 1)),
                BLOCK=block,
                num_warps=max(1, min(16, block // 256)),
                **overlap_options(x.device),
            )
            self.turn ^= 1
        return normed, total

    def best_token(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """See `Group.best_token`."""
        batch = len(scores)
        best = torch.empty_like(token_ids)
        _best_token_kernel[(cdiv(batch, SAMPLE_BLOCK),)](
            scores,
            token_ids,
            best,
            self.addresses,
            self.aborted,
            self.best_start,
            batch,
            self.max_num_seqs,
            RANK=self.rank,
            SIZE=self.size,
            NOTHING=-(1 << 31),
            BLOCK=SAMPLE_BLOCK,
            num_warps=4,
        )
        self.turn = 0  # everyone is through with both halves
        return best

    def abort(self) -> None:
        """End every wait for other ranks, those under way and those to come."""
        with torch.cuda.stream(self._abort_stream):
            self.aborted.copy_(self._one, non_blocking=True)


def all_reduce_add_rms_norm_torch(
    parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What every rank computes from all ranks' parts, which are added in the order of the ranks."""
    total = sum(part.float() for part in parts).to(residual.dtype)
    return add_rms_norm_torch(total, residual, weight, eps)


@triton.jit
def _send(address, offset, bits, inside, BITS: tl.constexpr, NOTHING: tl.constexpr):
    """Write into another rank's buffer, with 0.0 for -0.0."""
    start = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)
    tl.store(start + offset, tl.where(bits == NOTHING, 0, bits), mask=inside)


@triton.jit
def _receive(address, offset, inside, aborted, BITS: tl.constexpr, NOTHING: tl.constexpr):
    """Wait until all of it has arrived in this rank's own buffer, and make room for the next."""
    start = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16) + offset
    bits = tl.load(start, mask=inside, other=0, volatile=True)
    missing = tl.max((bits == NOTHING).to(tl.int32), axis=0)
    while missing > 0:
        bits = tl.load(start, mask=inside, other=0, volatile=True)
        missing = tl.max((bits == NOTHING).to(tl.int32), axis=0)
        if tl.load(aborted, volatile=True) != 0:
            missing = 0
    tl.store(start, tl.full(bits.shape, NOTHING, BITS), mask=inside)
    return bits


@triton.jit(do_not_specialize=["most_rows"])
def _all_reduce_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    addresses,
    aborted,
    half,
    most_rows,
    eps,
    x_stride,
    hidden,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TWO_HOPS: tl.constexpr,
    BITS: tl.constexpr,
    NOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """
    A program takes a row. It waits for the same row of other ranks, each of which sends before it waits and
    starts its rows in the same order, so the first unfinished row can always be finished. With TWO_HOPS only
    the row's owner gets everyone's part; the others wait for its result, which lies behind the parts.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    dtype: tl.constexpr = x.dtype.element_ty
    own_buffer = tl.load(addresses + RANK)
    if weight is not None:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    own = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if residual is not None:
        its_residual = tl.load(residual + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    owner = (row % SIZE).to(tl.int32)
    for i in tl.static_range(1, SIZE):
        peer = (RANK + i) % SIZE
        if not TWO_HOPS:
            place = half + (RANK * most_rows + row) * hidden + column
            _send(tl.load(addresses + peer), place, own.to(BITS, bitcast=True), inside, BITS, NOTHING)
        elif owner == peer:
            place = half + (RANK * (most_rows // SIZE) + row // SIZE) * hidden + column
            _send(tl.load(addresses + peer), place, own.to(BITS, bitcast=True), inside, BITS, NOTHING)

    result_place = half + (most_rows + row) * hidden + column
    if TWO_HOPS and owner != RANK:
        bits = _receive(own_buffer, result_place, inside, aborted, BITS, NOTHING)
        tl.store(normed + row * hidden + column, bits.to(dtype, bitcast=True), mask=inside)
    else:
        acc = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(0, SIZE):
            if source == RANK:
                acc += own.to(tl.float32)
            else:
                if TWO_HOPS:
                    place = half + (source * (most_rows // SIZE) + row // SIZE) * hidden + column
                else:
                    place = half + (source * most_rows + row) * hidden + column
                bits = _receive(own_buffer, place, inside, aborted, BITS, NOTHING)
                acc += bits.to(dtype, bitcast=True).to(tl.float32)
        value = acc.to(dtype)
        if residual is not None:
            value = (value.to(tl.float32) + its_residual).to(dtype)
        tl.store(total + row * hidden + column, value, mask=inside)
        if weight is not None:
            wide = value.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
            result = ((wide * scale).to(dtype).to(tl.float32) * gain).to(dtype)
            tl.store(normed + row * hidden + column, result, mask=inside)
            if TWO_HOPS:
                for i in tl.static_range(1, SIZE):
                    peer = (RANK + i) % SIZE
                    address = tl.load(addresses + peer)
                    _send(address, result_place, result.to(BITS, bitcast=True), inside, BITS, NOTHING)


@triton.jit(do_not_specialize=["start", "batch", "most_rows"])
def _best_token_kernel(
    scores,
    token_ids,
    best,
    addresses,
    aborted,
    start,
    batch,
    most_rows,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    NOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < batch
    own_score = tl.load(scores + row, mask=inside, other=0.0)
    own_token = tl.load(token_ids + row, mask=inside, other=0).to(tl.int32)
    for i in tl.static_range(1, SIZE):
        address = tl.load(addresses + (RANK + i) % SIZE)
        place = start + 2 * RANK * most_rows + row
        _send(address, place, own_score.to(tl.int32, bitcast=True), inside, tl.int32, NOTHING)
        _send(address, place + most_rows, own_token, inside, tl.int32, NOTHING)
    own_buffer = tl.load(addresses + RANK)
    score = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for source in tl.static_range(0, SIZE):
        if source == RANK:
            its_score, its_token = own_score, own_token
        else:
            place = start + 2 * source * most_rows + row
            bits = _receive(own_buffer, place, inside, aborted, tl.int32, NOTHING)
            its_score = bits.to(tl.float32, bitcast=True)
            its_token = _receive(own_buffer, place + most_rows, inside, aborted, tl.int32, NOTHING)
        better = its_score > score  # ranks come in the order of their tokens
        score = tl.where(better, its_score, score)
        token = tl.where(better, its_token, token)
    tl.store(best + row, token.to(tl.int64), mask=inside)
