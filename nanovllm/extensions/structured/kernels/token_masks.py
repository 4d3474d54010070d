"""Tokens that a row may not draw get a logit of -inf. Rows without a mask are not touched.

A mask has one bit for each token of the vocabulary, 1 where the token may be drawn.
"""

import torch
from torch import Tensor

from nanovllm.kernels.runtime import MINUS_INF, cdiv, tl, triton, use_triton

BLOCK = tl.constexpr(4096)


def apply_masks(logits: Tensor, index: Tensor, bits: Tensor, vocab_start: int) -> None:
    """
    Change logits [batch, vocabulary, or a shard of it that begins at vocab_start] in place.

    index: int32 [batch or more], which of the masks each row has, -1 for none.
    bits: the masks, int32 [masks, words]; token t is bit t % 32 of word t // 32.
    """
    if not use_triton(logits):
        return apply_masks_torch(logits, index, bits, vocab_start)
    batch, vocab = logits.shape
    _mask_kernel[(cdiv(vocab, BLOCK.value), batch)](
        logits,
        index,
        bits,
        logits.stride(0),
        bits.stride(0),
        vocab,
        vocab_start,
        num_warps=8,
    )


def apply_masks_torch(logits: Tensor, index: Tensor, bits: Tensor, vocab_start: int) -> None:
    (rows,) = (index[: len(logits)] >= 0).nonzero(as_tuple=True)
    tokens = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    is_banned = (bits[index[rows].long()][:, tokens // 32] >> (tokens % 32)) & 1 == 0
    logits[rows] = logits[rows].masked_fill(is_banned, -torch.inf)


@triton.jit
def _mask_kernel(
    logits,
    index,
    masks,
    logits_stride,
    masks_stride,
    vocab,
    vocab_start,
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.load(index + row)
    if place >= 0:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        token = (vocab_start + column).to(tl.uint32)  # unsigned: the division is a shift
        word = tl.load(masks + place.to(tl.int64) * masks_stride + token // 32, mask=inside, other=0)
        is_banned = ((word >> (token % 32)) & 1) == 0
        address = logits + row * logits_stride + column
        tl.store(address, tl.full([BLOCK], MINUS_INF, logits.dtype.element_ty), mask=inside & is_banned)
