"""The bytes of a GGUF file: a header of keys and values, and tensors.

Knows no model. The header is read with every length checked against the file, and counts and bytes are
limited, so that no file costs more time or memory than that of a large model. Tensors stay quantised in the
mapped file until they are sliced; gguf_blocks.py decodes the usual types, the `gguf` package the others.
Source: the specification, docs/gguf.md of ggml.
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nanovllm.extensions.checkpoints.library_errors import library_errors
from nanovllm.extensions.quantised.gguf_blocks import TYPES, Groups, decode_groups, decode_values

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# What a number's type, counted from 0, is called in `struct`. Type 8 is a text and type 9 an array.
NUMBERS = "BbHhIif?!!Qqd"
TEXT, ARRAY = 8, 9
# Of a list in a header, and of a header; several times what the largest vocabularies need.
MAX_ITEMS = 2**21
MAX_HEADER_BYTES = 2**26
PART = re.compile(r"(.*-)\d{5}(-of-\d{5}\.gguf)", re.IGNORECASE | re.DOTALL)


@dataclass
class GGUFTensor:
    """
    One tensor in the mapped file. Slices are torch tensors, of the stored dtype or, if quantised, float32 on
    `device`. Only the rows and, in each row, the blocks that a slice touches are read.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    quantisation: Any  # a gguf.GGMLQuantizationType
    block_size: int  # values that are quantised together
    encoded: np.ndarray  # uint8 [..., bytes of a row]
    order: np.ndarray | None = None  # where each row of a matrix is stored
    device: torch.device = torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype | None:
        """None if the tensor is quantised."""
        return PLAIN_DTYPES.get(self.quantisation.name)

    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor:
        if len(self.shape) != 2:
            return self._decode(self.encoded)[index]
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        encoded, part = self._touched(rows, columns)
        if not len(encoded):  # the last of many ranks may have no row of a small vocabulary
            return torch.empty(0, part.stop - part.start)
        return self._decode(encoded)[:, part]

    def joined(self, parts: Iterable[tuple["GGUFTensor", slice]]) -> "GGUFTensor":
        """These rows of matrices of its type, one below the other."""
        encoded = np.concatenate([tensor.encoded[rows] for tensor, rows in parts])
        return replace(self, shape=(len(encoded), self.shape[1]), encoded=encoded)

    def groups(self, rows: slice, columns: slice) -> Iterator[Groups]:
        """
        The codes and scales of these rows, some rows after the others, and of these columns, which are whole
        groups. Only for types that gguf_blocks.py knows.
        """
        encoded, part = self._touched(rows, columns)
        for each in decode_groups(encoded, self.quantisation.name, self.device):
            size = each.codes.shape[-1]
            yield each.cut(slice(part.start // size, part.stop // size))

    def _touched(self, rows: slice, columns: slice) -> tuple[np.ndarray, slice]:
        """
        The blocks of a matrix in which these rows and columns are, uint8 [rows, bytes of some blocks], and
        which of their columns these are.
        """
        start, stop, _ = columns.indices(self.shape[1])
        encoded = self.encoded[rows if self.order is None else self.order[rows]]
        size = encoded.shape[1] // max(self.shape[1] // self.block_size, 1)
        first = start // self.block_size
        last = -(-stop // self.block_size)
        skipped = first * self.block_size
        return encoded[:, first * size : last * size], slice(start - skipped, stop - skipped)

    def _decode(self, encoded: np.ndarray) -> torch.Tensor:
        if self.dtype is not None:
            return torch.from_numpy(np.array(encoded)).view(self.dtype)
        if self.quantisation.name in TYPES:
            return decode_values(encoded, self.quantisation.name, self.device)
        from gguf.quants import dequantize

        with library_errors(f"quantisation {self.quantisation.name} is not supported"):
            return torch.from_numpy(dequantize(np.ascontiguousarray(encoded), self.quantisation))


def read_file(path: str) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """The metadata and tensors of a file; if it is split, of all its parts, of which `path` is the first."""
    metadata, tensors = read_part(path)
    count = metadata.get("split.count", 1)
    if count == 1:
        return metadata, tensors
    name = PART.fullmatch(path)
    if name is None or metadata.get("split.no") != 0:
        raise ValueError(f"it is one of {count} parts; name the first, ...-00001-of-{count:05}.gguf")
    for number in range(2, count + 1):
        part = f"{name[1]}{number:05}{name[2]}"
        if not os.path.isfile(part):
            raise ValueError(f"of its {count} parts {part} is missing")
        others, more = read_part(part)
        if others.get("split.no") != number - 1:
            raise ValueError(f"{part} is not its part {number}")
        tensors |= more
    if len(tensors) != metadata.get("split.tensors.count"):
        raise ValueError(f"its {count} parts have {len(tensors)} tensors, which is not what it says")
    return metadata, tensors


def read_part(path: str) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """The metadata and tensors of one file. Raises ValueError, or whatever numbers that are none raise."""
    import gguf

    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, version, tensor_count, key_count = _numbers(data, "<4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r} and version {version}, not with b'GGUF' and 2 or 3")
    metadata = {}
    for _ in _counted(key_count):
        key = _text(data)
        [kind] = _numbers(data, "<I")
        metadata[key] = _value(data, kind)
    entries = []
    for _ in _counted(tensor_count):
        name = _text(data)
        [dimensions] = _numbers(data, "<I")
        format = f"<{len(_counted(dimensions))}QIQ"
        *shape, kind, offset = _numbers(data, format)  # the shape begins with columns
        entries.append((offset, name, tuple(shape[::-1]), gguf.GGMLQuantizationType(kind)))
    alignment = metadata.get("general.alignment", 32)
    begin = free = -(-data.tell() // alignment) * alignment
    tensors = {}
    for offset, name, shape, quantisation in sorted(entries):
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
        if shape[-1] % block_size:
            raise ValueError(f"tensor {name!r} of shape {shape} cannot be stored as {quantisation.name}")
        row_bytes = shape[-1] // block_size * block_bytes
        start = begin + offset
        size = math.prod(shape[:-1]) * row_bytes
        if start < free or name in tensors:
            raise ValueError(f"tensor {name!r} overlaps another or comes twice")
        free = start + size
        if free > len(data):
            raise ValueError(f"tensor {name!r} ends after the end of the file")
        encoded = np.frombuffer(data, np.uint8, size, start).reshape(*shape[:-1], row_bytes)
        tensors[name] = GGUFTensor(path, name, shape, quantisation, block_size, encoded)
    return metadata, tensors


def _counted(count: int) -> range:
    if count > MAX_ITEMS:
        raise ValueError(f"its header announces more than {MAX_ITEMS} items")
    return range(count)


def _numbers(data: mmap.mmap, format: str) -> tuple:
    """The next numbers, in this format of `struct`."""
    return struct.unpack(format, data.read(struct.calcsize(format)))


def _text(data: mmap.mmap) -> str:
    [length] = _numbers(data, "<Q")
    if data.tell() + length > min(len(data), MAX_HEADER_BYTES):
        raise ValueError("a text runs past the end of the file or of any reasonable header")
    return data.read(length).decode()


def _value(data: mmap.mmap, kind: int) -> Any:
    if kind == TEXT:
        return _text(data)
    if kind != ARRAY:
        return _numbers(data, f"<{NUMBERS[kind]}")[0]
    kind, count = _numbers(data, "<IQ")
    items = _counted(count)
    return [_text(data) for _ in items] if kind == TEXT else [*_numbers(data, f"<{count}{NUMBERS[kind]}")]
