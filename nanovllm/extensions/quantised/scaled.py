"""What the weight formats have in common: codes of few bits times scales, and how both multiply.

A scale is for a tile of the matrix: a row, a part of a row (a group), a block. A rank's cut need not fall on
the checkpoint's tiles. Where it does not, the rank's own tiles are smaller: of the greatest size that divides
every cut, so that each of them lies in one of the checkpoint's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.extensions.quantised.kernels.grouped_codes import can_use_linear_codes, linear_codes
from nanovllm.extensions.quantised.kernels.permute_k import permute_k
from nanovllm.extensions.quantised.kernels.quantised_weight import (
    BLOCK,
    HALF,
    NUMBERS_OF_CODES,
    QuantisedWeight,
    dequantise,
    dequantise_torch,
    pack,
    unpack,
)
from nanovllm.extensions.quantised.memory import has_room
from nanovllm.extensions.quantised.products import fast_products
from nanovllm.kernels.runtime import cdiv, is_on_gpu, use_triton
from nanovllm.layers.linear import Product, Shard, Weight
from nanovllm.utils.loader import StoredTensor, check_finite, check_stored

PIECE = 2**22  # weights that are converted at a time
ONE_TILE = 0, 0  # a checkpoint's tile, which has all rows and columns
SMALLEST = 1e-7  # scale: tiles of zeros must not have 0, in float16 either
SCALES = {torch.float32, torch.bfloat16, torch.float16}
SIGN = 0x80
OPTIONAL = {"load_ignored", "load_shape", "load_no_bias", "load_row_order"}  # among `Source.tensors`


class Source(NamedTuple):
    """
    How one kind of checkpoint stores a matrix: by the names of its tensors, which method of the weight loads
    each. Where integers hold several codes, these are neighbours along an axis of the matrix.
    """

    name: str
    tensors: dict[str, Callable]
    word: torch.dtype | None = None  # of integers with several codes; None: each code is a number
    axis: int = 1
    order: Sequence[int] | slice = slice(None)  # from which place in its integer each code comes
    turn: int = 1  # -1 if the matrix has its inputs first
    added_to_zeros: int = 0
    scale_dtypes: set[torch.dtype] = SCALES
    has_flat_scales: bool = False  # of one dimension
    scales_of: Callable[[Tensor], Tensor] = lambda stored: stored  # what stored ones mean

    def __str__(self) -> str:
        return self.name


def multiply_by_kernels(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias: for some rows from the codes, for more from a weight that is converted first."""
    if can_use_linear_codes(x, weight):
        return linear_codes(permute_k(x, weight.codes_per_byte), weight, bias)
    return F.linear(x, dequantise(weight, x.dtype), bias)


class ScaledWeight(Weight):
    """
    codes * scales, or (codes - zeros) * scales, of shape [out, in]. `scales` and `zeros` are [rows of tiles,
    columns of tiles], `tile` is rows and columns of one; the last may be cut off by the matrix's end. The
    product is rounded to `product_dtype`, as the libraries do that the checkpoints come from.

    Subclasses say of codes the dtype that holds them (uint8: two of 4 bits), and the range `lowest` to
    `highest`. `stored` has the checkpoint's tensors by name.
    """

    code_dtype: torch.dtype
    scale_dtype: torch.dtype | None = torch.float32  # None: the checkpoint's
    product_dtype: torch.dtype | None = None  # None, as long as no scales are loaded: that of scales
    lowest: float
    highest: float
    make_gemv = None  # see `fast_products`
    library: Any = None  # see `Scheme.make_weight`
    packed: Tensor | None = None  # the weight as the library multiplies it; in floats, if it is stacked
    is_stacked = False  # whether parts of it are multiplied, not the whole
    zero_point = 0  # where there are no `zeros`
    table, largest, rounds_inputs = 0, None, False  # see `QuantisedWeight`
    kept_codes: Tensor | None = None  # what is kept for each code of a checkpoint, if not itself
    finest_group = 0  # inputs that kernels want a scale for, if checkpoints have one for more
    optional = OPTIONAL

    def __init__(self, shards: dict[Any, Shard], stored_tile: tuple[int, int], source: Source):
        """`stored_tile`: rows and columns of the checkpoint's tiles; 0 is all that there are."""
        super().__init__(shards)
        self.dtype = torch.get_default_dtype()  # of what it is multiplied with
        self.parameters = {}
        self.stored_tile, self.source = stored_tile, source
        parts, (height, width) = shards.values(), self.shape
        cuts = [cut.start for part in parts for cut in (part.place, part.rows)]
        rows = math.gcd(stored_tile[0], *cuts) or height
        columns = math.gcd(stored_tile[1], self.finest_group, *(part.columns.start for part in parts))
        columns = min(columns, width) or width
        self.tile = (1 if columns == width else rows), columns  # a scale a row costs next to nothing
        grid = cdiv(height, self.tile[0]), cdiv(width, columns)
        self.scales = self._parameter("scales", *grid, dtype=self.scale_dtype or self.dtype)
        self.zeros = None
        self.bits = 4 if self.code_dtype == torch.uint8 else 8
        if self.bits == 4:
            width = cdiv(width, BLOCK) * HALF
        self.weight = self._parameter("weight", height, width, dtype=self.code_dtype)
        self.stored = {
            name: StoredTensor(getattr(self, load.__name__), load.__name__ in self.optional)
            for name, load in source.tensors.items()
        }

    def _parameter(self, name: str, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        param = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
        self.parameters[name] = param
        return param

    # Products

    @property
    def quantised(self) -> QuantisedWeight:
        """What kernels need to know."""
        return QuantisedWeight(
            self.weight,
            self.shape,
            self.scales,
            self.tile,
            self.zeros,
            self.zero_point,
            product_dtype=self.product_dtype or self.scales.dtype,
            table=self.table,
            largest=self.largest,
            rounds_inputs=self.rounds_inputs,
        )

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """By a kernel for some rows, and else by the library, from floats that are made in pieces or kept."""
        if self.packed is not None:
            return self.library.multiply(x, self.packed, bias)
        weight = self.quantised
        if use_triton(x) and weight.can_be_read():
            return multiply_by_kernels(x, weight, bias)
        outputs = []
        for rows in self.pieces(self.shape[0]):
            its_bias = None if bias is None else bias[rows]
            outputs.append(F.linear(x, self.floats(rows, x.dtype), its_bias))
        return torch.cat(outputs, dim=-1)

    def floats(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """These rows, which begin with a tile, as a CPU multiplies them."""
        weight = self.quantised
        return dequantise_torch(weight, rows, weight.product_dtype).to(dtype)

    def finish(self) -> None:
        """
        Where a CPU has room for it, the weight is kept in floats, too: to make them anew for every product
        would take most of a decode step.
        """
        self.packed = None
        size = math.prod(self.shape) * self.dtype.itemsize
        if self.library is not None and not is_on_gpu(self.weight) and has_room(size):
            pieces = [self.floats(rows, self.dtype) for rows in self.pieces(self.shape[0])]
            self.packed = torch.cat(pieces) if self.is_stacked else self.library.pack(torch.cat(pieces))

    def products(self, layer: Any) -> list[Product]:
        return fast_products([self.quantised], layer, self.dtype, self.make_gemv)

    def pieces(self, num_rows: int) -> Iterator[slice]:
        """Rows that are converted together, so that their copies take little memory."""
        height = self.tile[0]
        step = cdiv(max(1, PIECE // self.shape[1]), height) * height
        for start in range(0, num_rows, step):
            yield slice(start, min(start + step, num_rows))

    # Loading

    def load_ignored(self, loaded: Any, shard: Shard) -> None:
        """Not needed."""

    def load_codes(self, loaded: Any, shard: Shard) -> None:
        turn = self.source.turn
        cut = (shard.rows, shard.columns)[::turn]
        codes = self._turned(self.read_codes(loaded, shard.shape[::turn], cut, self.source.axis))
        if self.kept_codes is not None:
            codes = self.kept_codes.to(codes.device)[codes.int()]
        self.set_codes(shard.place, codes)

    def read_codes(self, loaded: Any, shape: tuple[int, ...], cut: tuple[slice, ...], axis: int) -> Tensor:
        """
        A cut of a matrix of codes of this shape. Several in an integer become uint8, of 8 bits int8: there
        the middle of their range stands for 0. Only the integers of the cut are read.
        """
        word = self.source.word
        if word is None:
            check_stored(loaded, shape, {self.code_dtype})
            return loaded[cut]
        size = 8 * word.itemsize // self.bits
        start, stop, _ = cut[axis].indices(shape[axis])
        stored, place = [*shape], [*cut]
        stored[axis] = cdiv(shape[axis], size)
        place[axis] = slice(start // size, cdiv(stop, size))
        check_stored(loaded, tuple(stored), {word})
        words = loaded[tuple(place)].to(self.weight.device).movedim(axis, 1)
        # Not contiguous(), which leaves the strides of a single column as they are; `view` wants 1.
        codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        if self.bits == 4:
            codes = unpack(codes, 4, 1)
        else:
            codes = (codes ^ SIGN).view(torch.int8)
        codes = codes.unflatten(1, (-1, size))[:, :, self.source.order].flatten(1)
        first = start % size
        return codes[:, first : first + stop - start].movedim(1, axis)

    def set_codes(self, rows: slice, codes: Tensor) -> None:
        """Store the codes of these rows, [rows, in]."""
        codes = codes.to(self.code_dtype)
        self.weight.data[rows] = pack(codes) if self.code_dtype == torch.uint8 else codes

    def load_scales(self, loaded: Any, shard: Shard) -> None:
        self._check_grid(loaded, shard, self.source.scale_dtypes)
        if (
            self.source.scale_dtypes is SCALES
        ):  # products are rounded to their dtype: one matrix cannot have two
            if self.product_dtype not in (None, loaded.dtype):
                raise ValueError(
                    f"dtype {loaded.dtype}, but a part of the same matrix has {self.product_dtype}"
                )
            self.product_dtype = loaded.dtype
            if self.scale_dtype is None:
                self.scales.data = self.scales.data.to(loaded.dtype)
        check_finite(self._load_grid(self.scales, self.source.scales_of(loaded[...]), shard))

    def _check_grid(self, loaded: Any, shard: Shard, dtypes: set) -> None:
        height, width = self.stored_tile
        if height == 1 and width and shard.shape[1] % width:
            raise ValueError(f"groups of {width} inputs do not divide {shard.shape[1]} of them")
        grid = self._stored_grid(shard)
        if grid == (1, 1) and tuple(loaded.shape) in ((), (1,)):
            grid = tuple(loaded.shape)
        elif self.source.has_flat_scales:
            grid = (math.prod(grid),)
        check_stored(loaded, grid, dtypes)

    def _stored_grid(self, shard: Shard) -> tuple[int, ...]:
        pairs = zip(shard.shape, self.stored_tile, strict=True)
        grid = tuple(cdiv(size, tile or size) for size, tile in pairs)
        return grid[:: self.source.turn]

    def _turned(self, matrix: Tensor) -> Tensor:
        return matrix if self.source.turn == 1 else matrix.t()

    def _load_grid(self, target: Tensor, loaded: Tensor, shard: Shard) -> Tensor:
        """
        Fill a part of `target`, a grid of this rank's tiles, with what the checkpoint's grid `loaded` has for
        them. Returns the part.
        """
        grid = self._turned(loaded.reshape(self._stored_grid(shard)))
        rows = self._stored_tiles(shard.rows, 0)
        columns = self._stored_tiles(shard.columns, 1)
        part = grid[rows][:, columns]
        start = shard.place.start // self.tile[0]
        return target.data[start : start + len(part)].copy_(part)

    def _stored_tiles(self, cut: slice, axis: int) -> Tensor:
        """For each tile of a cut, in which of the checkpoint's it lies."""
        starts = torch.arange(cut.start, cut.stop, self.tile[axis], device="cpu")
        return starts // (self.stored_tile[axis] or cut.stop)

    # Made here

    def load_floats(self, loaded: Any, shard: Shard) -> None:
        """Quantise a part that is stored in floating point."""
        check_stored(loaded, shard.shape)
        first = shard.rows.start
        for rows in self.pieces(shard.size[0]):
            matrix = loaded[first + rows.start : first + rows.stop, shard.columns]
            matrix = matrix.to(self.scales.device, torch.float32)
            check_finite(matrix)
            self._quantise(matrix, shard.place.start + rows.start)

    def fill(self, matrix: Tensor) -> None:
        """Quantise the whole of a matrix."""
        if self.zeros is not None:
            self.zeros.data.fill_(self.zero_point)
        self.load_floats(matrix, Shard(self.shape))

    def _quantise(self, matrix: Tensor, start: int) -> None:
        """Set the codes and scales of the rows from `start` on to what comes nearest to float32 values."""
        (num_rows, width), (tile_rows, tile_columns) = matrix.shape, self.tile
        padded = F.pad(matrix, (0, -width % tile_columns, 0, -num_rows % tile_rows))
        tiles = padded.view(len(padded) // tile_rows, tile_rows, -1, tile_columns)
        scales = self.choose_scales(tiles).to(self.scales.dtype)
        codes = self.round(tiles / scales.float()).view_as(padded)
        if self.zero_point:
            codes += self.zero_point
        first = start // tile_rows
        self.scales.data[first : first + len(tiles)] = scales[:, 0, :, 0]
        self.set_codes(slice(start, start + num_rows), codes[:num_rows, :width])

    def choose_scales(self, tiles: Tensor) -> Tensor:
        """For tiles [rows, rows of a tile, columns, columns of a tile]: [rows, 1, columns, 1]."""
        largest = tiles.abs().amax((1, 3), keepdim=True)
        return (largest / self.highest).clamp_min(SMALLEST)

    def round(self, values: Tensor) -> Tensor:
        """To codes."""
        if numbers := NUMBERS_OF_CODES.get(self.quantised.kind):
            return nearest(values, numbers)
        if not self.code_dtype.is_floating_point:
            values.round_()
        return values.clamp_(self.lowest, self.highest)


def nearest(values: Tensor, numbers: list[float]) -> Tensor:
    """Which of the numbers is nearest to each value."""
    table = torch.tensor(numbers, dtype=values.dtype, device=values.device)
    table, order = table.sort(stable=True)
    return order[torch.bucketize(values, (table[1:] + table[:-1]) / 2)]


# What checkpoints say of activations, of keys and of values is not needed.
OF_ACTIVATIONS = "input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale"
IGNORED = dict.fromkeys([*OF_ACTIVATIONS, "k_scale", "v_scale"], ScaledWeight.load_ignored)
FLOATS = Source("floats", {"weight": ScaledWeight.load_floats})  # which are quantised here
