"""Masks of tokens that may be drawn, which the host makes anew for each step: see
kernels/token_masks.py.

A step's forward pass runs meanwhile, and masks are copied to the device beside it.
"""

import contextlib
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.extensions.structured.kernels.token_masks import Masks
from nanovllm.kernels.runtime import cdiv


class TokenMasks(NamedTuple):
    """The masks of one step."""

    index: np.ndarray  # int32 [sequences], which of the masks each has, -1 for none
    bits: np.ndarray  # int32 [masks, words]


class DeviceMasks:
    """The device's copy of a step's masks, always in the same place, so that a CUDA graph finds it."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.tables = Masks(
            torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            torch.zeros(num_rows, cdiv(vocab_size, 32), dtype=torch.int32, device=device),
        )
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._sent = torch.empty(num_rows, dtype=torch.int32, device="cpu", pin_memory=is_gpu)  # index

    def receive(self, masks: TokenMasks) -> None:
        """
        Copy a step's masks to the device. The step before it must have been drawn, as it has been if masks
        were made of its tokens: nobody reads its masks any more.
        """
        tables = self.tables
        bits = np.ascontiguousarray(masks.bits[:, : tables.bits.shape[1]])  # a tokenizer may have more tokens
        index = self._sent[: len(masks.index)].copy_(torch.from_numpy(masks.index))
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            tables.index[: len(index)].copy_(index, non_blocking=True)
            if len(bits):
                source = torch.from_numpy(bits)
                source = source.pin_memory() if self._stream is not None else source
                tables.bits[: len(bits)].copy_(source, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
