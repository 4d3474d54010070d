"""Sums over keys in one order: what the kernels of exact attention are made of.

A tile of keys has sums of its own, and `fold` takes tiles together, one after the other. Sums are (highest,
total, acc): the highest score of each row, in units of log2; the total of its weights, several times the
same, since the matrix unit adds them up; and the values with these weights. A row is a query and a head. With
COLUMNS everything is transposed, so that rows are columns: the matrix unit takes 16 rows, and as few as 8
columns.
"""

from nanovllm.kernels.runtime import MINUS_INF, masked_load, tl, triton


@triton.jit
def along(x, SIZES):
    """x [rows] in the shape that goes with sums: a row each, or with COLUMNS a column."""
    return x[None, :] if SIZES.COLUMNS else x[:, None]


@triton.jit
def across(x, SIZES):
    """x [keys or dims] in the other shape: a column each, or with COLUMNS a row."""
    return x[:, None] if SIZES.COLUMNS else x[None, :]


@triton.jit
def zeros(WIDTH, SIZES):
    """[rows, WIDTH], or with COLUMNS [WIDTH, rows]."""
    return tl.full([WIDTH, SIZES.ROWS] if SIZES.COLUMNS else [SIZES.ROWS, WIDTH], 0.0, tl.float32)


@triton.jit
def highest_of(x, SIZES):
    """The highest number of each row."""
    return tl.max(x, axis=0 if SIZES.COLUMNS else 1)


@triton.jit
def times(rows, matrix, SIZES):
    """rows @ matrix. With COLUMNS rows are columns already, and those of the result: matrix.T @ rows."""
    left, right = (tl.trans(matrix), rows) if SIZES.COLUMNS else (rows, matrix)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def load_vectors(place, is_row, SIZES):
    """HEAD_DIM numbers of each row from its `place` on, in the shape of sums."""
    dim = tl.arange(0, SIZES.DIM_PAD)
    inside = along(is_row, SIZES) & across(dim < SIZES.HEAD_DIM, SIZES)
    return masked_load(along(place, SIZES) + across(dim, SIZES), inside)


@triton.jit
def store_vectors(place, vectors, is_row, SIZES):
    dim = tl.arange(0, SIZES.DIM_PAD)
    inside = along(is_row, SIZES) & across(dim < SIZES.HEAD_DIM, SIZES)
    tl.store(along(place, SIZES) + across(dim, SIZES), vectors, mask=inside)


@triton.jit
def sum_tile(query, keys, start, SIZES, MASKED):
    """
    The sums of the tile of keys at `start`, [rows], [rows, ONES] and [rows, DIM_PAD]. `keys` are where keys
    and values lie, with their strides, the block table, how many there are, the last one that each query
    sees, and the scale of scores. If not MASKED, all queries see the whole tile.
    """
    heads, table, len_k, last_key, scale_log2 = keys
    k, v, k_stride, v_stride = heads
    cache = k, v, table, k_stride, v_stride
    token = start + tl.arange(0, SIZES.KEY_TILE)
    key, value = SIZES.LOAD(cache, start, len_k, token < len_k, query.dtype, SIZES, MASKED)
    score = times(query, key, SIZES)
    if MASKED:
        score = tl.where(across(token, SIZES) <= along(last_key, SIZES), score, MINUS_INF)
    highest = highest_of(score, SIZES) * scale_log2
    if MASKED:
        highest = tl.maximum(highest, -1.0e30)  # finite for a query that sees none of these keys
    weight = tl.exp2(tl.fma(score, scale_log2, -along(highest, SIZES))).to(value.dtype)
    ones = tl.full([SIZES.KEY_TILE, SIZES.ONES], 1.0, value.dtype)
    return highest, times(weight, ones, SIZES), times(weight, value, SIZES)


@triton.jit
def fold(sums, more, SIZES):
    """The sums over the keys of both; `more` are of the next tile, of which a query may see no key."""
    highest, total, acc = sums
    next_highest, next_total, next_acc = more
    new_highest = tl.maximum(tl.maximum(highest, next_highest), -1.0e30)
    shrink = along(tl.exp2(highest - new_highest), SIZES)
    weight = along(tl.exp2(next_highest - new_highest), SIZES)
    total = tl.fma(total, shrink, next_total * weight)
    acc = tl.fma(acc, shrink, next_acc * weight)
    return new_highest, total, acc


@triton.jit
def no_sums(SIZES):
    highest = tl.full([SIZES.ROWS], MINUS_INF, tl.float32)
    return highest, zeros(SIZES.ONES, SIZES), zeros(SIZES.DIM_PAD, SIZES)


@triton.jit
def divided(sums, SIZES):
    """Attention, of what was seen; 0 where that is nothing."""
    _, total, acc = sums
    total = highest_of(total, SIZES)
    divisor = along(tl.where(total > 0, total, 1.0), SIZES)
    return tl.div_rn(acc, tl.broadcast_to(divisor, acc.shape))


@triton.jit
def store_sums(place, sums, is_row, SIZES):
    """At `place` [rows]: acc, then highest and total."""
    highest, total, acc = sums
    store_vectors(place, acc, is_row, SIZES)
    tl.store(place + SIZES.HEAD_DIM, highest, mask=is_row)
    tl.store(place + SIZES.HEAD_DIM + 1, highest_of(total, SIZES), mask=is_row)


@triton.jit
def load_sums(place, is_row, SIZES):
    """What `store_sums` has stored; where there is none, what changes nothing."""
    acc = load_vectors(place, is_row, SIZES)
    highest = tl.load(place + SIZES.HEAD_DIM, mask=is_row, other=MINUS_INF)
    total = along(masked_load(place + SIZES.HEAD_DIM + 1, is_row), SIZES)
    return highest, tl.broadcast_to(total, zeros(SIZES.ONES, SIZES).shape), acc
