"""GGUF's types, kept packed on GPUs, where kernels multiply them, and where a CPU computes in bfloat16.

For CPUs torch has a product for codes of 4 bits in groups of 32, 64, ... inputs, of which each stands for
(code - 8) * scale + zero, with scale and zero in the dtype of the activations, which is the only rounding.
Codes of more bits are two digits in one group: 16 * x is multiplied by the high one and x by the low one, so
that both have the same scale. The product is made for few rows. For more, oneDNN's on the converted weight is
faster: this is kept beside the codes where there is memory for both, else it is made again in pieces. In
float32 the product for codes is several times slower than oneDNN's: only converted weights are made.
"""

import functools
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, starmap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.extensions.quantised.fp4 import MXFP4_OF_GGUF, Mxfp4
from nanovllm.extensions.quantised.gguf_blocks import TYPES, Groups
from nanovllm.extensions.quantised.kernels.quantised_weight import QuantisedWeight, dequantise, unpack
from nanovllm.extensions.quantised.kernels.quantised_weight import pack as pack_halves
from nanovllm.extensions.quantised.memory import host_memory
from nanovllm.extensions.quantised.products import fast_products
from nanovllm.extensions.quantised.scaled import multiply_by_kernels
from nanovllm.extensions.quantised.scheme import Format, Scheme
from nanovllm.kernels import runtime
from nanovllm.layers.linear import Product, Shard, Weight
from nanovllm.utils.loader import StoredTensor, check_finite, check_stored

BITS = {kind: type_.bits for kind, type_ in TYPES.items()}  # of a code, by the types that stay packed
BLOCK = 32  # inputs: a multiple of every type's group
LANES = 64  # outputs whose codes torch keeps together, where it has AVX-512
TIMES = {1: 1, 2: 16 + 1}  # by digits, how often a zero is added, and the 8 that the product takes off
# By digits, from how many rows on converting a weight first is faster, and multiplying one that is converted.
MANY_ROWS = {1: 64, 2: 32}
SOME_ROWS = {1: 8, 2: 4}
PIECE = 2**20  # weights that are converted at a time
JOINED = 2**26  # bytes of matrices that are read as one


def read_gguf(config: dict[str, Any]) -> Scheme:
    """
    All layers are loaded by `GGUF` where its products are fast, else none; but experts in MXFP4, which has
    kernels of its own, always stay so.
    """
    dtype, on_gpu = torch.get_default_dtype(), torch.get_default_device().type == "cuda"
    has_room = False
    if on_gpu or runtime.compiling_for is not None:
        is_fast = runtime.HAVE_TRITON and dtype in (torch.bfloat16, torch.float16)
    else:
        is_fast = dtype == torch.bfloat16
        # Codes, their scales and weights in bfloat16 take less than 4 bytes each.
        has_room = 4 * config.get("num_weights", 0) <= host_memory() // 2
    format = Format(GGUF, {"keeps_weight": has_room})
    others = format if is_fast else None
    experts = Format(Mxfp4, {"source": MXFP4_OF_GGUF}) if config.get("has_mxfp4_experts") else others
    return Scheme([format, experts or format], lambda name: experts if ".experts." in name else others)


class GGUF(Weight):
    """
    A weight [out, in] whose shards have types of their own: neighbours of one kind are one run. With
    keeps_weight a CPU has it in bfloat16, too. There are no `parameters` as long as shards are missing.
    """

    make_gemv = None  # see `fast_products`
    library: Any = None  # `pack` and `multiply` of weights in floats, as those have it that are not quantised
    is_stacked = False  # whether parts of it are multiplied, not the whole

    def __init__(self, shards: dict[Any, Shard], keeps_weight: bool = False):
        super().__init__(shards)
        self.dtype, self.device = torch.get_default_dtype(), torch.get_default_device()  # of inputs
        self.parameters = {}
        self.keeps_weight = keeps_weight
        self.stored = {"weight": StoredTensor(self._load)}
        self.runs = []
        # By a shard's first row: its pieces, or if it is stacked the matrix that is still to be read.
        self._found = {shard.place.start: [] for shard in shards.values()}

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # Kernels that are compiled ahead are so before anything is loaded.
        outputs = [run.multiply(x) for run in self.runs] or [x.new_empty(len(x), self.shape[0])]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias

    def products(self, layer: Any) -> list[Product]:
        if not self.runs or not all(isinstance(run, KernelCodes) for run in self.runs):
            return []
        weights = [run.weight for run in self.runs]
        return fast_products(weights, layer, self.dtype, self.make_gemv)

    @property
    def quantised(self) -> Any:
        """
        Of a stacked one: the weight, or its codes for kernels or a CPU; as long as nothing is loaded, of the
        right shape alone.
        """
        if not self.runs:
            return torch.empty((), dtype=self.dtype).expand(self.shape)
        [run] = self.runs
        return run if isinstance(run, PackedCodes) else run.weight

    def _load(self, loaded: Any, shard: Shard) -> None:
        check_stored(loaded, shard.shape)
        self._found[shard.place.start] = [(loaded, shard)] if self.is_stacked else self._read(loaded, shard)
        if not all(self._found.values()):
            return
        pieces = chain.from_iterable(self._found.values())  # in the order of `shards`
        self._found = {}
        if self.is_stacked:
            pieces = chain.from_iterable(starmap(self._read, joined(pieces)))
        self.runs = join(pieces)
        if self.is_stacked and len(self.runs) > 1:
            weight = torch.cat([run.dequantise().to(self.dtype) for run in self.runs])
            self.runs = [Converted((None,), weight)]
        tensors = chain.from_iterable(run.tensors for run in self.runs)
        self.parameters = {str(i): tensor for i, tensor in enumerate(tensors)}

    def _read(self, loaded: Any, shard: Shard) -> list["Piece"]:
        columns = shard.columns
        kind = getattr(getattr(loaded, "quantisation", None), "name", None)
        if kind in BITS and columns.start % BLOCK == columns.stop % BLOCK == 0:
            groups = loaded.groups(shard.rows, columns)
            if torch.device(loaded.device).type == "cuda":
                return [pack_for_kernels(each, kind) for each in groups]
            if shard.size[0] % LANES == 0:
                library = self.library if self.keeps_weight else None
                return [pack(each, kind, library) for each in groups]
        values = loaded[shard.rows, columns].to(self.device, self.dtype)
        check_finite(values)
        return [Piece(Converted, (self.library,), (values,))]


def joined(matrices: Iterable[tuple[Any, Shard]]) -> Iterator[tuple[Any, Shard]]:
    """
    Neighbours of one type as one matrix, JOINED bytes at a time: one by one, the experts of eight layers of
    Qwen3-30B-A3B took a GPU 20 s. A CPU packs LANES rows together, so it joins only whole LANES. What an
    adapter changes stays apart.
    """

    def facts(matrix: tuple[Any, Shard]) -> tuple:
        tensor, shard = matrix
        return getattr(tensor, "quantisation", None), shard.size, shard.columns

    for (type_, size, columns), members in groupby(matrices, facts):
        members = [*members]
        if type_ is None:
            yield from members
            continue
        first, _ = members[0]
        count = max(1, JOINED // max(first.encoded.nbytes, 1))
        if torch.device(first.device).type == "cpu" and size[0] % LANES:
            count = 1
        for start in range(0, len(members), count):
            parts = [(tensor, shard.rows) for tensor, shard in members[start : start + count]]
            whole = first.joined(parts)
            yield whole, Shard(whole.shape, columns=columns)


class Piece(NamedTuple):
    """
    Some rows of a weight: the class of the run that they are in, what neighbours must agree in to be in it as
    well, and what its tensors have for these rows.
    """

    kind: type
    facts: tuple
    tensors: tuple[Tensor, ...]


def join(pieces: Iterable[Piece]) -> list[Any]:
    """The runs that these are."""
    runs = []
    for (kind, facts), members in groupby(pieces, lambda piece: piece[:2]):
        parts = zip(*(piece.tensors for piece in members), strict=True)
        runs.append(kind(facts, *map(torch.cat, parts)))
    return runs


def pack(groups: Groups, kind: str, library: Any) -> Piece:
    """The groups of a type, as GGUFTensor has them, for `PackedCodes`."""
    (codes, scales, offsets), bits = groups, BITS[kind]
    zeros = torch.zeros_like(scales)
    if offsets is not None:
        # Around 0 like other types' codes: their zeros are small, so rounding loses little.
        middle = 2 ** (bits - 1)
        codes, zeros = codes.view(torch.int8) - middle, offsets + middle * scales
    if bits < 8:  # the product takes 8 off
        codes = codes + 8
    else:  # no room for 8 more
        zeros = 8 * scales
    check_finite(scales + zeros)
    digits, group = 1 if bits == 4 else 2, codes.shape[-1]
    if digits == 2:
        codes = torch.stack(((codes >> 4) + 8, codes & 15), dim=2)
        zeros = zeros / 17  # it comes with 16 * x and with x
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.flatten(1).int(), 1)
    pairs = torch.stack((scales, zeros), dim=-1).to(torch.bfloat16)
    return Piece(PackedCodes, (digits, group, library), (packed, pairs))


class PackedCodes:
    """
    Rows of codes as torch packs them, half a byte a digit, a row's groups of [digits, inputs]; and each
    group's scale and zero in bfloat16 [groups, rows, 2]. Beside them a library may keep the `weight`, which
    is for more rows than the codes are multiplied with fast.
    """

    def __init__(self, facts: tuple, packed: Tensor, pairs: Tensor):
        self.digits, self.group, self.library = facts
        self.shape = len(packed), pairs.shape[1] * self.group
        self.packed = packed
        self.scales_and_zeros = pairs.transpose(0, 1).contiguous()
        self.places = torch.tensor([[16.0], [1.0]], dtype=torch.bfloat16)  # what the digits stand for
        self.weight = None
        if self.library is not None and is_readable():
            self.weight = self.library.pack(self.dequantise())
        kept = [] if self.weight is None else [self.weight]
        self.tensors = [self.packed, self.scales_and_zeros, *kept]

    def multiply(self, x: Tensor) -> Tensor:
        if self.weight is not None and len(x) >= SOME_ROWS[self.digits]:
            return self.library.multiply(x, self.weight)
        if len(x) >= MANY_ROWS[self.digits] and is_readable():
            return torch.cat([x @ columns for columns in self._columns()], dim=-1)
        if self.digits == 2:
            x = (x.unflatten(-1, (-1, 1, self.group)) * self.places).flatten(1)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return multiply(x.contiguous(), self.packed, self.digits * self.group, self.scales_and_zeros)

    def part(self, rows: slice) -> "PackedCodes":
        """The same for these rows, which begin and end with a whole number of LANES."""
        pairs = self.scales_and_zeros[:, rows].transpose(0, 1)
        return PackedCodes((self.digits, self.group, None), self.packed[rows], pairs)

    @property
    def is_symmetric(self) -> bool:
        """Whether its zeros are 0."""
        return not self.scales_and_zeros[..., 1].any()

    @property
    def readable_group(self) -> int:
        """The inputs of its groups, or 0 if it is not known how torch has packed them."""
        return self.group if is_readable() else 0

    def groups(self) -> Groups:
        """Codes int8 [outputs, groups, inputs], their scales and offsets, if these can be read."""
        codes = codes_in(self._blocks()).permute(0, 3, 1, 2).flatten(0, 1)
        scales, zeros = self.scales_and_zeros.float().permute(2, 1, 0)
        if self.digits == 1:
            return Groups((codes - 8).view(torch.int8), scales, zeros)
        if self.is_symmetric:
            return Groups((codes - 136).view(torch.int8), scales, zeros)
        return Groups((codes - 128).view(torch.int8), scales, 17 * zeros - 8 * scales)

    def dequantise(self) -> Tensor:
        if not is_readable():
            return self.multiply(torch.eye(self.shape[1], dtype=torch.bfloat16)).t()
        return torch.cat([columns.t() for columns in self._columns()])

    def _blocks(self) -> Tensor:
        """The packed codes by LANES outputs, as `codes_in` takes them."""
        num_groups = len(self.scales_and_zeros)
        return self.packed.view(-1, num_groups, self.digits, self.group, LANES // 2)

    def _columns(self) -> Iterator[Tensor]:
        """The weights transposed, bfloat16 [in, outputs], some outputs after the others."""
        step = max(1, PIECE // self.shape[1] // LANES)
        pieces = self._blocks().split(step)
        pairs = self.scales_and_zeros.split(step * LANES, 1)
        for packed, numbers in zip(pieces, pairs, strict=True):
            codes = codes_in(packed).permute(1, 2, 0, 3).flatten(2)  # [groups, inputs, outputs]
            codes = codes.to(torch.bfloat16).sub_(8 * TIMES[self.digits])
            scales, zeros = numbers.permute(2, 0, 1).unsqueeze(2).contiguous()
            weights = torch.addcmul(zeros * TIMES[self.digits], codes, scales)
            yield weights.flatten(0, 1)


def codes_in(packed: Tensor) -> Tensor:
    """
    The codes, uint8 [blocks of outputs, groups, inputs, 64], in what torch packs with AVX-512, [blocks of
    outputs, groups, digits, inputs, 32]: those of output i and i + 32 are one byte.
    """
    digits = unpack(packed, 4, LANES // 2).unbind(2)
    return digits[0] if len(digits) == 1 else digits[0] << 4 | digits[1]


@functools.cache
def is_readable() -> bool:
    """Whether `codes_in` knows how torch lays codes out, which is as suits the CPU. Any can be multiplied."""
    codes = torch.arange(2 * LANES * BLOCK, dtype=torch.int32).view(2 * LANES, BLOCK) % 13
    pairs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    found = codes_in(pairs.view(2, 1, 1, BLOCK, LANES // 2))
    return torch.equal(found.transpose(2, 3).reshape_as(codes), codes)


def pack_for_kernels(groups: Groups, kind: str) -> Piece:
    """The same for `KernelCodes`. Scales and offsets stay float16 if that is what the type has."""
    codes, scales, *offsets = (each for each in groups if each is not None)
    check_finite(sum(offsets, scales))
    group = codes.shape[-1]
    codes, zero_point = codes.flatten(1).view(torch.int8), 0
    if BITS[kind] == 4:
        zero_point = 0 if offsets else 8
        codes = pack_halves((codes + zero_point).view(torch.uint8))
    if TYPES[kind].values == BLOCK:  # those of longer blocks are a float16 times an integer
        scales, *offsets = (each.half() for each in (scales, *offsets))
    facts = group, zero_point, codes.dtype, scales.dtype, len(offsets)
    return Piece(KernelCodes, facts, (codes, scales, *offsets))


class KernelCodes:
    """Codes, scales and offsets that GPU kernels multiply."""

    def __init__(self, facts: tuple, codes: Tensor, scales: Tensor, *offsets: Tensor):
        group, zero_point, *_ = facts
        self.tensors = codes, scales, *offsets
        shape = len(codes), scales.shape[1] * group
        self.weight = QuantisedWeight(codes, shape, scales, (1, group), None, zero_point, *offsets)

    def multiply(self, x: Tensor) -> Tensor:
        return multiply_by_kernels(x, self.weight, None)

    def dequantise(self) -> Tensor:
        return dequantise(self.weight, torch.float32)


class Converted:
    """Weights in the dtype of the model, in the library's layout if it has one."""

    def __init__(self, facts: tuple, weight: Tensor):
        [library] = facts
        self.weight, self.product = weight, F.linear
        packed = None if library is None else library.pack(weight)
        if packed is not None:
            self.weight, self.product = packed, library.multiply
        self.tensors = (self.weight,)

    def multiply(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)

    def dequantise(self) -> Tensor:
        return self.weight
