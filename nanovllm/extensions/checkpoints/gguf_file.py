"""The bytes of a GGUF file: a header of keys and values, and tensors.

Knows no model. The header is read with every length checked against the file. Tensors stay quantised in the
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

from nanovllm.extensions.quantised.gguf_blocks import TYPES, Groups, decode_groups, decode_values

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# What a number's type, counted from 0, is called in `struct`. Type 8 is a text and type 9 an array.
NUMBERS = "BbHhIif?!!Qqd"
TEXT, ARRAY = 8, 9
# Of a header; several times what the largest vocabularies need.
MAX_ITEMS = 2**21
MAX_HEADER_BYTES = 2**28
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
        first, last = start // self.block_size, -(-stop // self.block_size)
        skipped = first * self.block_size
        return encoded[:, first * size : last * size], slice(start - skipped, stop - skipped)

    def _decode(self, encoded: np.ndarray) -> torch.Tensor:
        if self.dtype is not None:
            return torch.from_numpy(np.array(encoded)).view(self.dtype)
        if self.quantisation.name in TYPES:
            return decode_values(encoded, self.quantisation.name, self.device)
        from gguf.quants import dequantize

        try:
            return torch.from_numpy(dequantize(np.ascontiguousarray(encoded), self.quantisation))
        except NotImplementedError as error:
            raise ValueError(f"quantisation {self.quantisation.name} is not supported") from error


def read_file(path: str) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """The metadata and tensors of a file; if it is split, of all its parts, of which `path` is the first."""
    metadata, tensors = Header(path).read()
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
        others, more = Header(part).read()
        if others.get("split.no") != number - 1:
            raise ValueError(f"{part} is not its part {number}")
        tensors |= more
    if len(tensors) != metadata.get("split.tensors.count"):
        raise ValueError(f"its {count} parts have {len(tensors)} tensors, which is not what it says")
    return metadata, tensors


class Header:
    """
    Reads metadata and the list of tensors. Reading past the end of the file raises, and the sum of all counts
    is limited, so that no file costs more time or memory than that of a large model.
    """

    def __init__(self, path: str):
        self.path, self.position, self.items_left = path, 0, MAX_ITEMS
        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        import gguf

        magic, version, tensor_count, key_count = self._numbers("4sIQQ")
        if magic != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        metadata, entries = {}, []
        for _ in self._counted(key_count):
            key, [kind] = self._text(), self._numbers("I")
            metadata[key] = self._value(kind)
        for _ in self._counted(tensor_count):
            name, [dimensions] = self._text(), self._numbers("I")
            self._counted(dimensions)
            *shape, kind, offset = self._numbers(f"{dimensions}QIQ")  # the shape begins with columns
            entries.append((offset, name, tuple(shape[::-1]), gguf.GGMLQuantizationType(kind)))
        alignment = metadata.get("general.alignment", 32)
        begin = free = -(-self.position // alignment) * alignment
        tensors = {}
        for offset, name, shape, quantisation in sorted(entries):
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
            if shape[-1] % block_size:
                raise ValueError(f"tensor {name!r} of shape {shape} cannot be stored as {quantisation.name}")
            row_bytes = shape[-1] // block_size * block_bytes
            start, size = begin + offset, math.prod(shape[:-1]) * row_bytes
            if start < free or name in tensors:
                raise ValueError(f"tensor {name!r} overlaps another or comes twice")
            if start + size > len(self.data):
                raise ValueError(f"tensor {name!r} ends after the end of the file")
            free = start + size
            encoded = np.frombuffer(self.data, np.uint8, size, start).reshape(*shape[:-1], row_bytes)
            tensors[name] = GGUFTensor(self.path, name, shape, quantisation, block_size, encoded)
        return metadata, tensors

    def _counted(self, count: int) -> range:
        self.items_left -= count
        if self.items_left < 0:
            raise ValueError(f"its header announces more than {MAX_ITEMS} items")
        return range(count)

    def _numbers(self, codes: str) -> tuple:
        values = struct.unpack_from(f"<{codes}", self.data, self.position)
        self.position += struct.calcsize(f"<{codes}")
        return values

    def _text(self) -> str:
        [length] = self._numbers("Q")
        start, self.position = self.position, self.position + length
        if self.position > min(len(self.data), MAX_HEADER_BYTES):
            raise ValueError("a text runs past the end of the file or of any reasonable header")
        return self.data[start : self.position].decode()

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            return self._numbers(NUMBERS[kind])[0]
        kind, count = self._numbers("IQ")
        items = self._counted(count)
        return [self._text() for _ in items] if kind == TEXT else [*self._numbers(f"{count}{NUMBERS[kind]}")]
