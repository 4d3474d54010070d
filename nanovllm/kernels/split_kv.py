"""Attention to a context that several programs have split among them: parts are added up by log-sum-exp."""

from nanovllm.kernels.runtime import tl, triton


@triton.jit
def combine_splits(
    partial, log_sums, first_row, used_splits, out, dim,
    GROUP: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    MOST_COMBINED: tl.constexpr,
):  # fmt: skip
    """Add up the partial results of all splits, some at a time, so that all heads are waited for at once."""
    head = tl.arange(0, HEADS_PAD)
    split = tl.arange(0, MOST_COMBINED)
    is_head = head < GROUP
    is_dim = dim < HEAD_DIM
    highest = tl.full([HEADS_PAD], -1.0e30, tl.float32)  # finite where there is no head
    total = tl.zeros([HEADS_PAD], tl.float32)
    acc = tl.zeros([HEADS_PAD, DIM_PAD], tl.float32)
    for start in range(0, used_splits, MOST_COMBINED):
        part_row = (first_row + (start + split)[:, None] * GROUP + head[None, :]).to(tl.int64)
        is_used = (start + split < used_splits)[:, None] & is_head[None, :]
        log_sum = tl.load(log_sums + part_row, mask=is_used, other=float("-inf"))
        address = partial + part_row[:, :, None] * HEAD_DIM + dim[None, None, :]
        part = tl.load(address, mask=is_used[:, :, None] & is_dim[None, None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(log_sum, axis=0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(log_sum - new_highest[None, :])
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        highest = new_highest
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + head[:, None] * HEAD_DIM + dim[None, :], result, mask=is_head[:, None] & is_dim[None, :])
