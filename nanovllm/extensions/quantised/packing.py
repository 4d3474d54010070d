"""How checkpoints pack codes: several in an integer, the first in its lowest bits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import cdiv
from nanovllm.utils.loader import check_stored

SIGN = 0x80


class Packing(NamedTuple):
    """
    Codes of so many bits in integers of this dtype, which hold neighbours along an axis of the matrix; in
    another `order` where it says from which place each of them comes.
    """

    dtype: torch.dtype
    bits: int
    axis: int = 1
    order: Sequence[int] | slice = slice(None)

    def read(
        self, loaded: Any, shape: tuple[int, ...], cut: tuple[slice, ...], device: torch.device
    ) -> Tensor:
        """
        A cut of a matrix of codes of this shape. Several in an integer become uint8, of 8 bits int8: there
        the middle of their range stands for 0. Only the integers of the cut are read.
        """
        size = 8 * self.dtype.itemsize // self.bits
        start, stop, _ = cut[self.axis].indices(shape[self.axis])
        stored, place = [*shape], [*cut]
        stored[self.axis] = cdiv(shape[self.axis], size)
        place[self.axis] = slice(start // size, cdiv(stop, size))
        check_stored(loaded, tuple(stored), {self.dtype})
        words = loaded[tuple(place)]
        if size == 1:
            return words
        words = words.to(device).movedim(self.axis, 1)
        # Not contiguous(), which leaves the strides of a single column as they are; `view` wants 1.
        codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        else:
            codes = (codes ^ SIGN).view(torch.int8)
        codes = codes.unflatten(1, (-1, size))[:, :, self.order].flatten(1)
        first = start % size
        return codes[:, first : first + stop - start].movedim(1, self.axis)
