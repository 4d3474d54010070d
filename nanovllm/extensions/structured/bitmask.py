"""The logits processor of structured outputs: bitmasks of tokens that may be drawn, which the host makes anew
for each step while its forward pass runs. They are copied to the device beside it.
"""

import contextlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.structured.grammar import Grammars
from nanovllm.extensions.structured.kernels.token_masks import Masks, apply_masks
from nanovllm.extensions.structured.matchers import Grammar
from nanovllm.kernels.runtime import cdiv
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import SamplingParams


class TokenMasks(NamedTuple):
    """The masks of one step."""

    index: np.ndarray  # int32 [sequences], which of the masks each has, -1 for none
    bits: np.ndarray  # int32 [masks, words]


class BitmaskProcessor(LogitsProcessor):
    name = "bitmask"
    fields = ("structured_outputs",)
    order = 30
    needs_whole = False
    waits_for_host = True
    reads_slowly = True
    grammars: Grammars | None = None

    def start(self, config: Any, prompts: Any) -> None:
        self.grammars = Grammars(config, prompts.tokenizer)

    def wants(self, params: SamplingParams) -> bool:
        return params.structured_outputs is not None

    def read(self, request: Any, where: str) -> Grammar:
        try:
            return self.grammars.compile(request.params.structured_outputs)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def host_input(self, sequences: list[Sequence]) -> TokenMasks:
        guided = {
            i: seq.request.own[self.name]
            for i, seq in enumerate(sequences)
            if self.name in seq.request.own and not seq.is_finished
        }
        return TokenMasks(*self.grammars.masks(sequences, guided))

    def ended(self, seq: Sequence) -> None:
        self.grammars.drop(seq.seq_id)

    def allocate(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """The device's copy of a step's masks is always in the same place, so that a CUDA graph finds it."""
        self.device, is_gpu = device, device.type == "cuda"
        self.masks = Masks(
            torch.full((num_slots,), -1, dtype=torch.int32, device=device),
            torch.zeros(num_slots, cdiv(vocab_size, 32), dtype=torch.int32, device=device),
        )
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._sent = torch.empty(num_slots, dtype=torch.int32, device="cpu", pin_memory=is_gpu)  # index

    def receive(self, message: TokenMasks) -> None:
        """
        Copy a step's masks to the device. The step before it must have been drawn, as it has been if masks
        were made of its tokens: nobody reads its masks any more.
        """
        masks, stream = self.masks, self._stream
        num_words = masks.bits.shape[1]  # a tokenizer may have more tokens
        bits = np.ascontiguousarray(message.bits[:, :num_words])
        index = self._sent[: len(message.index)].copy_(torch.from_numpy(message.index))
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            masks.index[: len(index)].copy_(index, non_blocking=True)
            if len(bits):
                source = torch.from_numpy(bits)
                source = source.pin_memory() if stream is not None else source
                masks.bits[: len(bits)].copy_(source, non_blocking=True)
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        apply_masks(logits, self.masks, step.vocab_start)
        return logits

    def reset(self) -> None:
        if self.grammars is not None:
            self.grammars.reset()

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()
        del self.masks
