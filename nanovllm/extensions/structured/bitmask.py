"""The logits processor of structured outputs: bitmasks of tokens that may be drawn, which the host makes anew
for each step while its forward pass runs. They are copied to the device beside it.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor, Observer
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.structured.grammar import Compiler
from nanovllm.extensions.structured.kernels.token_masks import apply_masks
from nanovllm.extensions.structured.matchers import CompiledGrammar, GrammarState, problem_of
from nanovllm.kernels.runtime import cdiv
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import SamplingParams


class GrammarError(RuntimeError):
    """A sequence cannot go on: its grammar has become too large, or needs text that no token has."""

    def __init__(self, sequence: Sequence, message: str):
        super().__init__(message)
        self.sequence = sequence


class BitmaskProcessor(LogitsProcessor, Observer):
    name = "bitmask"
    fields = ("structured_outputs",)
    order = 30
    needs_whole = False
    waits_for_host = True
    reads_slowly = True

    def __init__(self) -> None:
        self._states: dict[Sequence, GrammarState] = {}  # of those that go on

    def start(self, config: Any, prompts: Any) -> None:
        self.max_num_seqs = config.max_num_seqs
        self.compiler = Compiler(config, prompts.tokenizer)

    def wants(self, params: SamplingParams) -> bool:
        return params.structured_outputs is not None

    def read(self, request: Any, where: str) -> CompiledGrammar:
        try:
            return self.compiler.compile(request.params.structured_outputs)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def host_input(self, sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """
        Which of the masks each sequence has, int32 [sequences], -1 for none, and the masks, int32 [masks,
        words]: an array that is used again for the next masks. A GrammarError ends a sequence whose grammar
        has become too large, or needs text that no token has.
        """
        guided = [seq for seq in sequences if self.name in seq.request.own and not seq.is_finished]
        for seq in guided:
            if seq not in self._states:
                self._states[seq] = GrammarState(seq, seq.request.own[self.name])
        # A thread works through neighbours: those that share a lexer would wait for each other in several.
        states = sorted((self._states[seq] for seq in guided), key=lambda state: id(state.lexer))
        masks = {state.sequence: i for i, state in enumerate(states)}
        index = np.int32([masks.get(seq, -1) for seq in sequences])
        bits = self._bits[: len(states)]
        if states:
            self._make_masks(states, bits)
        return index, bits

    def _make_masks(self, states: list[GrammarState], bits: np.ndarray) -> None:
        """In their order, in bits, int32 [states, words]."""
        steps = []
        for state in states:
            new = state.take_new()
            if len(new) == 1:
                steps.append((state.matcher, new[0]))
            else:
                state.matcher.consume_tokens(new)
        if steps:
            self._threads.consume_token_par(steps)
        places = [(state.matcher, place) for place, state in enumerate(states)]
        self.compiler.llguidance.numpy.fill_next_token_bitmask_par(self._threads, places, bits)
        for state in states:
            if state.matcher.is_error():
                after = f"structured_outputs after {state.sequence.num_completion_tokens - 1} tokens"
                raise GrammarError(state.sequence, f"{after}: {problem_of(state.matcher)}")

    @functools.cached_property
    def _threads(self) -> Any:
        """They share sequences among them, without Python's lock."""
        return self.compiler.llguidance.LLExecutor()

    @functools.cached_property
    def _bits(self) -> np.ndarray:
        """int32 [sequences, words]: where masks are made, from where a GPU can copy them by itself."""
        shape = self.max_num_seqs, cdiv(self.compiler.vocabulary.vocab_size, 32)
        is_pinned = self._stream is not None
        return torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=is_pinned).numpy()

    def ended(self, seq: Sequence) -> None:
        if seq in self._states:
            self._states.pop(seq).close()

    def allocate(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """The device's copy of a step's masks is always in the same place, so that a CUDA graph finds it."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        index = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.masks = index, index.new_zeros(num_slots, cdiv(vocab_size, 32))  # see apply_masks

    def receive(self, message: tuple[np.ndarray, np.ndarray]) -> None:
        """
        Copy a step's masks to the device. The step before it must have been drawn, as it has been if masks
        were made of its tokens: nobody reads its masks any more.
        """
        index, bits = message
        words = self.masks[1].shape[1]  # a tokenizer may have more tokens
        bits = np.ascontiguousarray(bits[:, :words])
        with torch.cuda.stream(self._stream):
            for target, array in zip(self.masks, (index, bits), strict=True):
                source = torch.from_numpy(array)
                source = source.pin_memory() if target.is_cuda else source
                target[: len(array)].copy_(source, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        apply_masks(logits, *self.masks, step.vocab_start)
        return logits

    def reset(self) -> None:
        """Texts are read again when their sequences go on."""
        while self._states:
            self._states.popitem()[1].close()

    def close(self) -> None:
        """End the threads and free what masks were made in."""
        for name in ("_threads", "_bits", "masks"):
            self.__dict__.pop(name, None)
