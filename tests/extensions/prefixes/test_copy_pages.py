"""The copy of blocks' beginnings against its torch twin, and the twin against a loop over tokens.

As in test_kernels.py, the Triton kernel runs through Triton's interpreter in a child process, and on a GPU.
"""

import os
import subprocess
import sys

import pytest
import torch

from nanovllm.extensions.prefixes.kernels.copy_pages import copy_pages, copy_pages_torch
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])
on_devices = pytest.mark.parametrize("device", ["cpu", GPU] if INTERPRETED else [GPU])

# block_size, kv_heads, head_dim
SHAPES = [(16, 2, 64), (64, 1, 128), (256, 2, 64), (48, 3, 80), (16, 1, 21), (16, 1, 256), (32, 3, 20)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
def test_the_kernel_agrees_with_its_twin_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cpu", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]


def make_pages(shape, dtype, device="cpu", layers=3, blocks=9):
    """Any bytes, NaNs among them."""
    torch.manual_seed(0)
    size = torch.empty(2, layers, blocks, *shape, dtype=dtype)
    return torch.randint(256, (size.nbytes,), dtype=torch.uint8).view(dtype).view(size.shape).to(device)


def as_bytes(pages):
    return pages.cpu().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_copies_so_many_tokens_and_nothing_else(dtype):
    pages = make_pages((16, 2, 20), dtype)
    expected = pages.clone()
    copies = [(0, 8, 1), (0, 3, 15), (5, 2, 16), (7, 1, 0)]
    for source, target, num_tokens in copies:
        for token in range(num_tokens):
            expected[:, :, target, token] = pages[:, :, source, token]
    copy_pages_torch(pages, torch.tensor(copies))
    assert torch.equal(as_bytes(pages), as_bytes(expected))


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_agrees_with_its_twin(shape, dtype, device):
    """Not a byte more is written, in blocks of any size."""
    size = shape[0]
    for count in (1, 2, 3):
        copies = torch.tensor([(0, 8, size - 1), (0, 3, 1), (5, 2, size)][-count:])
        pages, expected = make_pages(shape, dtype, device), make_pages(shape, dtype)
        copy_pages(pages, copies.to(device))
        copy_pages_torch(expected, copies)
        assert torch.equal(as_bytes(pages), as_bytes(expected))


@pytest.mark.gpu
@needs_cuda
def test_blocks_beyond_four_gigabytes_are_copied():
    pages = torch.zeros(2, 2, 5000, 256, 8, 128, dtype=torch.uint8, device="cuda")
    pages[:, :, 4999] = 7
    copy_pages(pages, torch.tensor([[4999, 4998, 100]], device="cuda"))
    assert (pages[:, :, 4998, :100] == 7).all() and not pages[:, :, 4998, 100:].any()
    assert not pages[:, :, :4998].any()
