"""How several programs share the context of a sequence in decode, and how their results become one.

Softmax needs the sum over all tokens, so a program that sees only some of them stores a partial result and
the logarithm of its own sum. The last program to finish weighs the partial results by these sums and adds
them up.
"""

from nanovllm.kernels.runtime import MINUS_INF, masked_load, tl, triton

COMBINED = tl.constexpr(8)  # partial results that a program loads at a time


@triton.jit
def own_tokens(context_lens, extras, SIZES, HOOKS):
    """
    Which tokens this program sees, of sequence program_id(1). -> how many there are, the first that the query
    sees, begin and end of this program's, and how many splits have tokens.
    """
    TILE: tl.constexpr = SIZES.TILE
    seq = tl.program_id(1)
    context_len = tl.load(context_lens + seq)
    first = 0
    if HOOKS.first_token is not None:
        first = tl.maximum(HOOKS.first_token(extras, seq, context_len, HOOKS), 0)
    begin = first // TILE * TILE
    end = context_len
    used_splits = 1
    if SIZES.SPLIT:
        own_len = context_len - begin
        tiles = tl.cdiv(own_len, TILE)  # a short context has fewer than there are splits
        tiles_of_each = tl.cdiv(tiles, tl.num_programs(2))
        split_len = tl.maximum(tiles_of_each, 1) * TILE
        used_splits = tl.maximum(tl.cdiv(own_len, split_len), 1)
        begin += tl.program_id(2) * split_len
        end = tl.minimum(begin + split_len, context_len)
    return context_len, first, begin, end, used_splits


@triton.jit
def store_result(
    out,
    partial,
    counters,
    sums,
    kept,
    index,
    used_splits,
    SIZES,
    HOOKS,
):
    """
    Store attention over all tokens, or this program's part of it. `sums` are the highest score, in units of
    log2, and total [HEADS_PAD], and the weighted values [DIM_PAD, HEADS_PAD].
    """
    HEADS: tl.constexpr = SIZES.HEADS
    HEAD_DIM: tl.constexpr = SIZES.HEAD_DIM
    if HOOKS.end is not None:
        sums = HOOKS.end(kept, index, sums, SIZES, HOOKS)
    highest, total, acc = sums
    row, _, dim = index
    is_head = row < HEADS
    is_dim = dim < HEAD_DIM
    inside = is_head[None, :] & is_dim[:, None]
    result = acc / tl.where(total > 0, total, 1.0)[None, :]
    number = tl.program_id(1) * SIZES.SHARES + tl.program_id(0)  # of the result
    out += number.to(tl.int64) * HEADS * HEAD_DIM
    if used_splits == 1:
        tl.store(out + row[None, :] * HEAD_DIM + dim[:, None], result, mask=inside)
    elif SIZES.SPLIT:
        splits = tl.num_programs(2)
        num_rows = tl.num_programs(1) * SIZES.SHARES * splits * HEADS
        first_row = number * splits * HEADS
        log_sums = partial + num_rows.to(tl.int64) * HEAD_DIM
        own_row = first_row + tl.program_id(2) * HEADS + row
        own_row = own_row.to(tl.int64)
        own_address = partial + own_row[None, :] * HEAD_DIM + dim[:, None]
        tl.store(own_address, result, mask=inside)
        tl.store(log_sums + own_row, highest + tl.log2(total), mask=is_head)
        tl.debug_barrier()  # all threads have stored their part before the counter says so
        num_before = tl.atomic_add(counters + number, 1)
        if num_before == used_splits - 1:
            tl.store(counters + number, 0)
            combine_splits(partial, log_sums, first_row, used_splits, out, dim, SIZES)


@triton.jit
def combine_splits(partial, log_sums, first_row, used_splits, out, dim, SIZES):
    """
    Add up the partial results of all splits. COMBINED of them are loaded at once, and added one by one: with
    an axis for the splits threads would have to exchange their sums, which takes longer than all else here.
    """
    head = tl.arange(0, SIZES.COMBINED_HEADS)
    is_dim = dim < SIZES.HEAD_DIM
    highest = tl.full([SIZES.COMBINED_HEADS], -1.0e30, tl.float32)  # finite where there is no head
    total = tl.zeros_like(highest)
    acc = tl.full([SIZES.COMBINED_HEADS, SIZES.DIM_PAD], 0.0, tl.float32)
    for start in range(0, used_splits, COMBINED):
        for i in tl.static_range(COMBINED):
            is_there = head < tl.where(start + i < used_splits, SIZES.HEADS, 0)
            row = (first_row + (start + i) * SIZES.HEADS + head).to(tl.int64)
            log_sum = tl.load(log_sums + row, mask=is_there, other=MINUS_INF)
            address = partial + row[:, None] * SIZES.HEAD_DIM + dim[None, :]
            part = masked_load(address, is_there[:, None] & is_dim[None, :])
            new_highest = tl.maximum(highest, log_sum)
            shrink = tl.exp2(highest - new_highest)
            weight = tl.exp2(log_sum - new_highest)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            highest = new_highest
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    address = out + head[:, None] * SIZES.HEAD_DIM + dim[None, :]
    tl.store(address, result, mask=(head < SIZES.HEADS)[:, None] & is_dim[None, :])
