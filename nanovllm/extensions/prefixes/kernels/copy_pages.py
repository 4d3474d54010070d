"""Copies the first tokens of some blocks of the KV cache to other blocks, for all layers in one launch.

The keys of one layer of a block are contiguous, and so are its values. So the first tokens of a block are
2 * layers pieces of memory. They are copied as bytes, whatever their dtype is.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.runtime import cdiv, masked_load, tl, triton, use_triton

BYTES = tl.constexpr(8192)  # that a program copies at most


def copy_blocks(kv_cache: Any, copies: Tensor) -> None:
    """Copy at least the first tokens of a KVCache's blocks, in all layers; see `copy_pages`."""
    for pages in kv_cache.pages:
        if not kv_cache.layout.has_token_rows:
            copies[:, 2] = pages.shape[3]  # whole blocks
        copy_pages(pages, copies)


def copy_pages(pages: Tensor, copies: Tensor) -> None:
    """
    Copy the first tokens of some blocks to others. No target may be a source.

    pages is [2, layers, blocks, block_size, kv_heads, head_dim]; copies int64 [copies, 3] are source, target
    and number of tokens. Both are contiguous.
    """
    if not use_triton(pages):
        return copy_pages_torch(pages, copies)
    data = pages.flatten(3).flatten(0, 1).view(torch.uint8)  # [2 * layers, blocks, bytes of a block]
    planes, num_blocks, block_bytes = data.shape
    _copy_kernel[(len(copies), planes, cdiv(block_bytes, BYTES.value))](
        data,
        copies,
        num_blocks,
        TOKEN_BYTES=block_bytes // pages.shape[3],
        BLOCK_BYTES=block_bytes,
    )


def copy_pages_torch(pages: Tensor, copies: Tensor) -> None:
    for source, target, end in copies.tolist():
        pages[:, :, target, :end] = pages[:, :, source, :end]


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_kernel(pages, copies, num_blocks, TOKEN_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """A program copies up to BYTES bytes of the keys or the values of one layer."""
    copy = copies + tl.program_id(0) * 3
    byte = tl.program_id(2) * BYTES + tl.arange(0, BYTES)
    inside = byte < tl.load(copy + 2) * TOKEN_BYTES
    plane = pages + tl.program_id(1).to(tl.int64) * num_blocks * BLOCK_BYTES
    source = plane + tl.load(copy) * BLOCK_BYTES
    target = plane + tl.load(copy + 1) * BLOCK_BYTES
    tl.store(target + byte, masked_load(source + byte, inside), mask=inside)
