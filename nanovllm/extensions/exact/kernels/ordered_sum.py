"""A sum whose order is written down: torch's reductions choose theirs by the number of rows."""

from torch import Tensor

from nanovllm.kernels.runtime import (
    masked_load,
    next_power_of_2,
    overlap_options,
    pdl_wait,
    tl,
    triton,
    use_triton,
)


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over parts [rows, parts, width], contiguous: added in float32, rounded once. [rows, width]."""
    rows, count, width = parts.shape
    if not use_triton(parts):
        total = parts[:, 0].float()
        for part in range(1, count):
            total = total + parts[:, part]  # not in place: in float32 these are the parts
        return total.to(parts.dtype)
    out = parts.new_empty(rows, width)
    if rows:
        sizes = dict(PARTS=count, WIDTH=width, BLOCK=next_power_of_2(width))
        _sum_kernel[(rows,)](parts, out, **sizes, **overlap_options(parts.device))
    return out


@triton.jit
def _sum_kernel(parts, out, PARTS, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    pdl_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    parts += row * PARTS * WIDTH + column
    total = masked_load(parts, inside).to(tl.float32)
    for part in range(1, PARTS):
        total += masked_load(parts + part * WIDTH, inside).to(tl.float32)
    tl.store(out + row * WIDTH + column, total, mask=inside)
