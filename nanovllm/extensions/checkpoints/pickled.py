"""Weights in files of `torch.save`, as folders had them before safetensors.

Such a file is a zip archive of a pickle and of the tensors' bytes. Of the pickle torch's own unpickler makes
tensors and nothing else (`weights_only`); the bytes stay in the mapped file. What it cannot do is checked
here: that nothing in the archive is compressed, so that no small file takes much memory, and what it found.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from nanovllm.extensions.checkpoints.library_errors import library_errors
from nanovllm.extensions.checkpoints.names import MadeTensor
from nanovllm.utils.validation import check

NAMES = "pytorch_model.bin", "pytorch_model-*.bin"  # of one file, of several
MAX_BYTES_OF_PICKLE = 2**26  # several times what the most tensors need


def read_pickled(file: Path) -> Iterator[MadeTensor]:
    """The tensors of a file. Raises ValueError naming it."""
    problem = f"{file} is not a complete file of torch.save (1.6 or later)"
    with library_errors(problem), zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    for entry in entries:
        is_stored = entry.compress_type == zipfile.ZIP_STORED
        is_small = not entry.filename.endswith(".pkl") or entry.file_size <= MAX_BYTES_OF_PICKLE
        check(is_stored and is_small, f"{file} must hold uncompressed parts, and a small pickle", entry)
    with library_errors(f"{file} is not weights alone"):
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    check(isinstance(found, dict), f"{file} must hold tensors by name", type(found).__name__)
    for name, tensor in found.items():
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.is_cpu
        check(isinstance(name, str) and is_plain, f"{file} must hold tensors by name", name)
        yield MadeTensor(str(file), name, tensor.detach())
