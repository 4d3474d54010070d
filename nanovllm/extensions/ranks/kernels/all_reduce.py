"""Sums over the tensor-parallel ranks, and the norm after them, by GPUs that write into each other's memory.

Each rank has a receive buffer that the others write into. An element that has not arrived is -0.0 there, and
senders send 0.0 in place of -0.0. So the data themselves say when they are there: no barrier, no flag, one
trip over the link. Whoever has read an element puts the -0.0 back. Calls use the two halves of the buffer in
turn: a rank that sends for the third call has received every rank's part of the second, so all ranks have
finished the first.
"""

import torch
from torch import Tensor

from nanovllm.kernels.runtime import MINUS_INF, cdiv, next_power_of_2, overlap_options, tl, triton

HALF_BYTES = 64 << 20  # of the receive buffer; larger sums are computed part by part
TWO_HOPS_BYTES = 256 << 10  # from this size on the bytes sent cost more than a second trip over the link
SAMPLE_BLOCK = 128
INT32_MIN = torch.iinfo(torch.int32).min  # has the bits of -0.0


class PeerMemory:
    """
    `buffer` is this rank's receive buffer, int32 [num_words()], and `addresses` says where each rank's is
    mapped in this process. All ranks make the same calls in the same order, and `best_token` is the last of
    each step. After it both halves are free, so every step (also one in a CUDA graph) begins with the first.

    All ranks must have made their PeerMemory before any of them makes its first call.
    """

    def __init__(
        self, rank: int, addresses: list[int], buffer: Tensor, dtype: torch.dtype, max_num_seqs: int,
        half_bytes: int = HALF_BYTES,
    ):  # fmt: skip
        self.rank, self.size, self.max_num_seqs = rank, len(addresses), max_num_seqs
        self.turn = 0  # which half the next call uses
        self.half = half_bytes // dtype.itemsize  # elements
        self.best_start = 2 * half_bytes // 4
        bits = torch.int32 if dtype.itemsize == 4 else torch.int16
        buffer[: self.best_start].view(bits).fill_(torch.iinfo(bits).min)
        buffer[self.best_start :].fill_(INT32_MIN)
        self.aborted = buffer[-1:].zero_()
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=buffer.device)
        if buffer.is_cuda:
            self._one = torch.ones(1, dtype=torch.int32).pin_memory()
            self._abort_stream = torch.cuda.Stream(buffer.device)
            torch.cuda.synchronize(buffer.device)

    @staticmethod
    def num_words(size: int, max_num_seqs: int, half_bytes: int = HALF_BYTES) -> int:
        """Two halves for activations, a score and a token id for every rank and sequence, and `aborted`."""
        return 2 * half_bytes // 4 + 2 * size * max_num_seqs + 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x [rows, hidden]."""
        return self.all_reduce_add_rms_norm(x, None, None, 0.0)[1]

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        """See `Group.all_reduce_add_rms_norm`. Which rank sums up which rows depends on shapes alone."""
        rows, hidden = x.shape
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        normed = None if weight is None else torch.empty_like(total)
        # Only the owner of a row computes its sum and sends the result: two trips, but fewer bytes.
        two_hops = weight is not None and self.size > 2 and x.nbytes >= TWO_HOPS_BYTES
        most_rows = self.half // hidden // (2 if two_hops else self.size)
        most_rows -= most_rows % self.size
        block = next_power_of_2(hidden)
        for start in range(0, rows, most_rows):
            part = slice(start, min(start + most_rows, rows))
            _all_reduce_kernel[(part.stop - start,)](
                x[part], None if residual is None else residual[part], weight,
                None if normed is None else normed[part], total[part],
                self.addresses, self.aborted, self.turn * self.half, most_rows, eps, x.stride(0), hidden,
                RANK=self.rank, SIZE=self.size, TWO_HOPS=two_hops,
                BITS=tl.int32 if x.element_size() == 4 else tl.int16,
                MISSING=-(1 << (8 * x.element_size() - 1)), BLOCK=block,
                num_warps=max(1, min(16, block // 256)), **overlap_options(x.device),
            )  # fmt: skip
            self.turn ^= 1
        return normed, total

    def best_token(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """See `Group.best_token`."""
        batch = len(scores)
        best = torch.empty_like(token_ids)
        _best_token_kernel[(cdiv(batch, SAMPLE_BLOCK),)](
            scores, token_ids, best, self.addresses, self.aborted, self.best_start, batch, self.max_num_seqs,
            RANK=self.rank, SIZE=self.size, MISSING=INT32_MIN, BLOCK=SAMPLE_BLOCK, num_warps=4,
        )  # fmt: skip
        self.turn = 0  # all ranks have finished with both halves
        return best

    def abort(self) -> None:
        """End every wait for other ranks, the present and the later ones."""
        with torch.cuda.stream(self._abort_stream):
            self.aborted.copy_(self._one, non_blocking=True)


@triton.jit
def _send(address, offset, bits, inside, BITS: tl.constexpr, MISSING: tl.constexpr):
    """Write into another rank's buffer, with 0.0 for -0.0."""
    start = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)
    tl.store(start + offset, tl.where(bits == MISSING, 0, bits), mask=inside)


@triton.jit
def _receive(address, offset, inside, aborted, BITS: tl.constexpr, MISSING: tl.constexpr):
    """Wait until all elements have arrived in this rank's own buffer, and mark their places as empty."""
    start = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16) + offset
    bits = tl.load(start, mask=inside, other=0, volatile=True)
    is_missing = tl.max((bits == MISSING).to(tl.int32), axis=0)
    while is_missing > 0:
        bits = tl.load(start, mask=inside, other=0, volatile=True)
        is_missing = tl.max((bits == MISSING).to(tl.int32), axis=0)
        if tl.load(aborted, volatile=True) != 0:
            is_missing = 0
    tl.store(start, tl.full(bits.shape, MISSING, BITS), mask=inside)
    return bits


@triton.jit
def _part_row(sender, row, most_rows, SIZE: tl.constexpr, TWO_HOPS: tl.constexpr):
    """Which row of the half a sender's part of `row` has. With TWO_HOPS a rank only gets the rows it owns."""
    if TWO_HOPS:
        return sender * (most_rows // SIZE) + row // SIZE
    else:
        return sender * most_rows + row


@triton.jit(do_not_specialize=["most_rows"])
def _all_reduce_kernel(
    x, residual, weight, normed, total,
    addresses, aborted, half_start, most_rows, eps, x_stride, hidden,
    RANK: tl.constexpr, SIZE: tl.constexpr, TWO_HOPS: tl.constexpr,
    BITS: tl.constexpr, MISSING: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    A program takes a row. It waits for the same row of the other ranks. All ranks send before they wait, and
    start their rows in the same order, so the first unfinished row can always be finished. With TWO_HOPS the
    parts go to the row's owner only, and the result comes back, to a place behind those of the parts.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    dtype: tl.constexpr = x.dtype.element_ty
    own_buffer = tl.load(addresses + RANK)
    if weight is not None:
        norm_weight = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    own = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if residual is not None:
        own_residual = tl.load(residual + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    owner = (row % SIZE).to(tl.int32)
    for i in tl.static_range(1, SIZE):
        peer = (RANK + i) % SIZE
        if not TWO_HOPS or owner == peer:
            place = half_start + _part_row(RANK, row, most_rows, SIZE, TWO_HOPS) * hidden + column
            _send(tl.load(addresses + peer), place, own.to(BITS, bitcast=True), inside, BITS, MISSING)

    result_place = half_start + (most_rows + row) * hidden + column
    if TWO_HOPS and owner != RANK:
        bits = _receive(own_buffer, result_place, inside, aborted, BITS, MISSING)
        tl.store(normed + row * hidden + column, bits.to(dtype, bitcast=True), mask=inside)
    else:
        acc = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(0, SIZE):
            if source == RANK:
                acc += own.to(tl.float32)
            else:
                place = half_start + _part_row(source, row, most_rows, SIZE, TWO_HOPS) * hidden + column
                bits = _receive(own_buffer, place, inside, aborted, BITS, MISSING)
                acc += bits.to(dtype, bitcast=True).to(tl.float32)
        value = acc.to(dtype)
        if residual is not None:
            value = (value.to(tl.float32) + own_residual).to(dtype)
        tl.store(total + row * hidden + column, value, mask=inside)
        if weight is not None:
            wide = value.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
            result = ((wide * scale).to(dtype).to(tl.float32) * norm_weight).to(dtype)
            tl.store(normed + row * hidden + column, result, mask=inside)
            if TWO_HOPS:
                for i in tl.static_range(1, SIZE):
                    peer = (RANK + i) % SIZE
                    address = tl.load(addresses + peer)
                    _send(address, result_place, result.to(BITS, bitcast=True), inside, BITS, MISSING)


@triton.jit(do_not_specialize=["start", "batch", "most_rows"])
def _best_token_kernel(
    scores, token_ids, best,
    addresses, aborted, start, batch, most_rows,
    RANK: tl.constexpr, SIZE: tl.constexpr, MISSING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK sequences, and sends and receives first their scores, then their tokens."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < batch
    own_score = tl.load(scores + row, mask=inside, other=0.0)
    own_token = tl.load(token_ids + row, mask=inside, other=0).to(tl.int32)
    for i in tl.static_range(1, SIZE):
        address = tl.load(addresses + (RANK + i) % SIZE)
        place = start + 2 * RANK * most_rows + row
        _send(address, place, own_score.to(tl.int32, bitcast=True), inside, tl.int32, MISSING)
        _send(address, place + most_rows, own_token, inside, tl.int32, MISSING)
    own_buffer = tl.load(addresses + RANK)
    score = tl.full([BLOCK], MINUS_INF, tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for source in tl.static_range(0, SIZE):
        if source == RANK:
            its_score, its_token = own_score, own_token
        else:
            place = start + 2 * source * most_rows + row
            bits = _receive(own_buffer, place, inside, aborted, tl.int32, MISSING)
            its_score = bits.to(tl.float32, bitcast=True)
            its_token = _receive(own_buffer, place + most_rows, inside, aborted, tl.int32, MISSING)
        better = its_score > score  # of equal scores the lowest rank wins, which has the lowest token ids
        score = tl.where(better, its_score, score)
        token = tl.where(better, its_token, token)
    tl.store(best + row, token.to(tl.int64), mask=inside)
