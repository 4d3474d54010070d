"""Copies the first tokens of some blocks of the KV cache to other blocks, for all layers in one launch.

The keys of one layer of a block are contiguous, and so are its values. So the first tokens of a block are
2 * layers pieces of memory. They are copied as bytes, whatever their dtype is.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.runtime import cdiv, tl, triton, use_triton

BYTES_PER_PROGRAM = 8192


def copy_blocks(kv_cache: Any, sources: Tensor, targets: Tensor, num_tokens: Tensor) -> None:
    """Copy at least the first tokens of a KVCache's blocks, in all layers; see `copy_pages`."""
    for pages in kv_cache.pages:
        if not kv_cache.layout.has_token_rows:  # whole blocks, as if of one token
            pages, num_tokens = pages.flatten(3)[..., None, :], torch.ones_like(num_tokens)
        copy_pages(pages, sources, targets, num_tokens)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor, num_tokens: Tensor) -> None:
    """
    Copy the first num_tokens[i] tokens of block sources[i] to block targets[i]. No target may be a source.

    pages is [2, layers, blocks, block_size, kv_heads, head_dim], the others int32 or int64 [copies]. All are
    contiguous.
    """
    if not use_triton(pages):
        return copy_pages_torch(pages, sources, targets, num_tokens)
    data = pages.flatten(3).flatten(0, 1).view(torch.uint8)  # [2 * layers, blocks, bytes of a block]
    planes, num_blocks, block_bytes = data.shape
    parts = cdiv(block_bytes, BYTES_PER_PROGRAM)
    _copy_kernel[(len(sources) * parts, planes)](
        data, sources, targets, num_tokens, num_blocks,
        TOKEN_BYTES=block_bytes // pages.shape[3], BLOCK_BYTES=block_bytes,
        PARTS=parts, BYTES=BYTES_PER_PROGRAM,
    )  # fmt: skip


def copy_pages_torch(pages: Tensor, sources: Tensor, targets: Tensor, num_tokens: Tensor) -> None:
    for source, target, end in zip(sources.tolist(), targets.tolist(), num_tokens.tolist(), strict=True):
        pages[:, :, target, :end] = pages[:, :, source, :end]


@triton.jit(do_not_specialize=["sources", "targets", "num_tokens", "num_blocks"])
def _copy_kernel(
    pages, sources, targets, num_tokens, num_blocks,
    TOKEN_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, PARTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """A program copies up to BYTES bytes of the keys or the values of one layer."""
    copy = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    num_bytes = tl.load(num_tokens + copy).to(tl.int32) * TOKEN_BYTES
    if part * BYTES >= num_bytes:
        return
    byte = part * BYTES + tl.arange(0, BYTES)
    plane = pages + tl.program_id(1).to(tl.int64) * num_blocks * BLOCK_BYTES
    source = plane + tl.load(sources + copy).to(tl.int64) * BLOCK_BYTES
    target = plane + tl.load(targets + copy).to(tl.int64) * BLOCK_BYTES
    inside = byte < num_bytes
    tl.store(target + byte, tl.load(source + byte, mask=inside), mask=inside)
