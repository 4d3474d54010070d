"""Masks are made in the background by llguidance's threads, which do not need Python's lock."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from nanovllm.engine.sequence import Sequence


class Reader:
    """Follows the text of one sequence through its grammar."""

    def __init__(self, sequence: Sequence):
        self.sequence = sequence
        self.matcher: Any = sequence.grammar.deep_copy()
        self.num_read = sequence.num_prompt_tokens

    def take_new(self) -> list[int]:
        """The tokens of the sequence that have not been read, which the caller reads now."""
        new = self.sequence.token_ids[self.num_read :]
        self.num_read += len(new)
        return new


def problem_of(matcher: Any) -> str:
    """Why a matcher is in error, without the description of its state; empty if it is not."""
    reason = matcher.get_error().split("\n<")[0].strip()
    return "no text fits" if reason.startswith("NoExtension") else reason


class MaskThreads:
    """
    One thread waits while llguidance's share the sequences among them. Python's own threads, making a mask
    each, were slower than that: they wait for Python's lock before and after every 25 us of work.
    """

    def __init__(self, executor: Any):
        """executor: llguidance's LLExecutor."""
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, "masks")
        self._made: Future | None = None

    def begin(self, readers: list[Reader], bits: np.ndarray) -> None:
        """Make the next mask of each, in their order, in bits, int32 [readers, words]."""
        work = [reader.matcher for reader in readers], [reader.take_new() for reader in readers], bits
        if len(readers) == 1:  # quicker than to wake a thread
            self._make(*work)
        else:
            self._made = self._thread.submit(self._make, *work)

    def _make(self, matchers: list[Any], new: list[list[int]], bits: np.ndarray) -> None:
        steps = []
        for matcher, token_ids in zip(matchers, new, strict=True):
            if len(token_ids) == 1:
                steps.append((matcher, token_ids[0]))
            else:
                matcher.consume_tokens(token_ids)
        if steps:
            self._executor.consume_token_par(steps)
        places = [(matcher, place) for place, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(places, bits.ctypes.data, bits.strides[0], len(bits))

    def wait(self) -> None:
        """Until all masks are made."""
        made, self._made = self._made, None
        if made is not None:
            made.result()

    def close(self) -> None:
        self._thread.shutdown()
