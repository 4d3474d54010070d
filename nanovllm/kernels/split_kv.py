"""How several programs share the context of a sequence in decode, and how their results become one.

Softmax needs the sum over all tokens, so a program that sees only some of them stores a partial result and
the logarithm of its own sum. The last program to finish weighs the partial results by these sums and adds
them up.
"""

from nanovllm.kernels.runtime import MINUS_INF, masked_load, tl, triton


@triton.jit
def own_tokens(context_lens, extras, SIZES, HOOKS):
    """
    Which tokens this program sees, of sequence program_id(1). -> the first that the query sees, begin and end
    of this program's, and how many splits have tokens.
    """
    seq = tl.program_id(1)
    context_len = tl.load(context_lens + seq)
    first = 0
    if HOOKS.first_token is not None:
        first = tl.maximum(HOOKS.first_token(extras, seq, context_len, HOOKS), 0)
    begin = first // SIZES.TILE * SIZES.TILE
    end = context_len
    used_splits = 1
    if SIZES.SPLIT:
        own_len = context_len - begin
        tiles = tl.cdiv(own_len, SIZES.TILE)  # a short context has fewer than there are splits
        split_len = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), 1) * SIZES.TILE
        used_splits = tl.maximum(tl.cdiv(own_len, split_len), 1)
        begin += tl.program_id(2) * split_len
        end = tl.minimum(begin + split_len, context_len)
    return first, begin, end, used_splits


@triton.jit
def store_result(out, partial, counters, sums, kept, index, used_splits, SIZES, HOOKS):
    """
    Store attention over all tokens, or this program's part of it. `sums` are the highest score, in units of
    log2, and total [HEADS_PAD], and the weighted values [DIM_PAD, HEADS_PAD].
    """
    if HOOKS.end is not None:
        sums = HOOKS.end(kept, index, sums, SIZES, HOOKS)
    highest, total, acc = sums
    row, _, dim = index
    is_head = row < SIZES.HEADS
    inside = is_head[None, :] & (dim < SIZES.HEAD_DIM)[:, None]
    result = acc / tl.where(total > 0, total, 1.0)[None, :]
    number = tl.program_id(1) * SIZES.SHARES + tl.program_id(0)  # of the result
    out += number.to(tl.int64) * SIZES.HEADS * SIZES.HEAD_DIM
    if used_splits == 1:
        tl.store(out + row[None, :] * SIZES.HEAD_DIM + dim[:, None], result, mask=inside)
    elif SIZES.SPLIT:
        splits = tl.num_programs(2)
        num_rows = tl.num_programs(1) * SIZES.SHARES * splits * SIZES.HEADS
        first_row = number * splits * SIZES.HEADS
        log_sums = partial + num_rows.to(tl.int64) * SIZES.HEAD_DIM
        own_row = (first_row + tl.program_id(2) * SIZES.HEADS + row).to(tl.int64)
        own_address = partial + own_row[None, :] * SIZES.HEAD_DIM + dim[:, None]
        tl.store(own_address, result, mask=inside)
        tl.store(log_sums + own_row, highest + tl.log2(total), mask=is_head)
        tl.debug_barrier()  # all threads have stored their part before the counter says so
        num_before = tl.atomic_add(counters + number, 1)
        if num_before == used_splits - 1:
            tl.store(counters + number, 0)
            combine_splits(partial, log_sums, first_row, used_splits, out, dim, SIZES)


@triton.jit
def combine_splits(partial, log_sums, first_row, used_splits, out, dim, SIZES):
    """Add up the partial results of all splits, COMBINED_SPLITS at a time."""
    head = tl.arange(0, SIZES.COMBINED_HEADS)
    split = tl.arange(0, SIZES.COMBINED_SPLITS)
    is_head = head < SIZES.HEADS
    is_dim = dim < SIZES.HEAD_DIM
    highest = tl.full([SIZES.COMBINED_HEADS], -1.0e30, tl.float32)  # finite where there is no head
    total = tl.zeros_like(highest)
    acc = tl.full([SIZES.COMBINED_HEADS, SIZES.DIM_PAD], 0.0, tl.float32)
    for start in range(0, used_splits, SIZES.COMBINED_SPLITS):
        part_row = (first_row + (start + split)[:, None] * SIZES.HEADS + head[None, :]).to(tl.int64)
        is_used = (start + split < used_splits)[:, None] & is_head[None, :]
        log_sum = tl.load(log_sums + part_row, mask=is_used, other=MINUS_INF)
        address = partial + part_row[:, :, None] * SIZES.HEAD_DIM + dim[None, None, :]
        part = masked_load(address, is_used[:, :, None] & is_dim[None, None, :])
        new_highest = tl.maximum(highest, tl.max(log_sum, axis=0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(log_sum - new_highest[None, :])
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        highest = new_highest
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_address = out + head[:, None] * SIZES.HEAD_DIM + dim[None, :]
    tl.store(out_address, result, mask=is_head[:, None] & is_dim[None, :])
