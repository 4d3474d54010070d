"""Attention to a context that several programs have split among them: parts are added up by log-sum-exp."""

from nanovllm.kernels.runtime import tl, triton


@triton.jit
def own_span(context_len, first, split, splits, SIZES: tl.constexpr):
    """
    Where the tokens of this split begin and end, in whole tiles from the one that holds `first` on, and the
    number of splits that have any: a short context has fewer tiles than there are splits.
    """
    begin = first // SIZES.TILE * SIZES.TILE
    end = context_len
    used_splits = 1
    if SIZES.SPLIT:
        own_len = context_len - begin
        split_len = tl.maximum(tl.cdiv(tl.cdiv(own_len, SIZES.TILE), splits), 1) * SIZES.TILE
        used_splits = tl.maximum(tl.cdiv(own_len, split_len), 1)
        begin += split * split_len
        end = tl.minimum(begin + split_len, context_len)
    return begin, end, used_splits


@triton.jit
def store_result(out, partial, counters, result, where, places, SIZES: tl.constexpr):
    """
    Store what a program has computed, or its part of it, where it is not the only one. The last to arrive
    adds up all parts. `highest` is in units of log2; `total` [GROUP_PAD], `acc` [DIM_PAD, GROUP_PAD].
    """
    highest, total, acc = result
    seq, share, split, splits, used_splits = where
    row, head, dim = places
    SHARES: tl.constexpr = SIZES.KV_HEADS * SIZES.READERS
    inside = (row < SIZES.GROUP)[None, :] & (dim < SIZES.HEAD_DIM)[:, None]
    result = acc / tl.where(total > 0, total, 1.0)[None, :]
    out_row = seq.to(tl.int64) * SHARES * SIZES.GROUP + head[None, :]
    out_address = out + out_row * SIZES.HEAD_DIM + dim[:, None]
    if used_splits == 1:
        tl.store(out_address, result, mask=inside)
    elif SIZES.SPLIT:
        pair = seq * SHARES + share
        num_rows = tl.num_programs(1) * SHARES * splits * SIZES.GROUP
        first_row = pair * splits * SIZES.GROUP
        log_sums = partial + num_rows.to(tl.int64) * SIZES.HEAD_DIM  # log2 of each partial denominator
        own_row = (first_row + split * SIZES.GROUP + row).to(tl.int64)
        tl.store(partial + own_row[None, :] * SIZES.HEAD_DIM + dim[:, None], result, mask=inside)
        tl.store(log_sums + own_row, highest + tl.log2(total), mask=row < SIZES.GROUP)
        tl.debug_barrier()  # all threads have stored their part before the counter says so
        num_before = tl.atomic_add(counters + pair, 1)
        if num_before == used_splits - 1:
            tl.store(counters + pair, 0)
            out += pair.to(tl.int64) * SIZES.GROUP * SIZES.HEAD_DIM
            combine_splits(partial, log_sums, first_row, used_splits, out, dim, SIZES)


@triton.jit
def combine_splits(partial, log_sums, first_row, used_splits, out, dim, SIZES: tl.constexpr):
    """Add up the partial results of all splits, some at a time, so that all heads are waited for at once."""
    HEADS_PAD: tl.constexpr = SIZES.HEADS_PAD
    DIM_PAD: tl.constexpr = SIZES.DIM_PAD
    head = tl.arange(0, HEADS_PAD)
    split = tl.arange(0, SIZES.MOST_COMBINED)
    is_head = head < SIZES.GROUP
    is_dim = dim < SIZES.HEAD_DIM
    highest = tl.full([HEADS_PAD], -1.0e30, tl.float32)  # finite where there is no head
    total = tl.zeros([HEADS_PAD], tl.float32)
    acc = tl.zeros([HEADS_PAD, DIM_PAD], tl.float32)
    for start in range(0, used_splits, SIZES.MOST_COMBINED):
        part_row = (first_row + (start + split)[:, None] * SIZES.GROUP + head[None, :]).to(tl.int64)
        is_used = (start + split < used_splits)[:, None] & is_head[None, :]
        log_sum = tl.load(log_sums + part_row, mask=is_used, other=float("-inf"))
        address = partial + part_row[:, :, None] * SIZES.HEAD_DIM + dim[None, None, :]
        part = tl.load(address, mask=is_used[:, :, None] & is_dim[None, None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(log_sum, axis=0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(log_sum - new_highest[None, :])
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        highest = new_highest
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_address = out + head[:, None] * SIZES.HEAD_DIM + dim[None, :]
    tl.store(out_address, result, mask=is_head[:, None] & is_dim[None, :])
