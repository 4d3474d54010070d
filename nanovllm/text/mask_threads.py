"""Threads that make masks, one sequence's after another's, so that a slow mask holds up no others.

Most masks take some 25 us, but one in a hundred takes fifty times as long; llguidance works on them without
Python's lock. Threads that are left behind by a step that failed go on for a moment, with matchers and memory
that nobody else uses any more.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from nanovllm.engine.sequence import Sequence

MAX_THREADS = 16  # more would only wait for Python's lock


class Reader:
    """Follows the text of one sequence through its grammar."""

    def __init__(self, sequence: Sequence):
        self.sequence = sequence
        self.matcher: Any = sequence.grammar.deep_copy()
        self.num_read = sequence.num_prompt_tokens
        self.new: list[int] = []  # tokens to be read before the next mask is made
        self.place = 0  # of the next mask
        self.seconds = 0.0  # that the last mask took
        self.problem = ""  # why the text cannot go on

    def prepare(self, place: int) -> None:
        """Take over what is new of the sequence."""
        self.place, self.new = place, self.sequence.token_ids[self.num_read :]
        self.num_read += len(self.new)

    def make_mask(self, address: int, num_bytes: int) -> None:
        """Read what is new, and write there what may come next."""
        start = time.perf_counter()
        try:
            for token_id in self.new:
                self.matcher.consume_token(token_id)
            self.matcher.unsafe_compute_mask_ptr(address, num_bytes)
            if self.matcher.is_error():
                self.problem = problem_of(self.matcher)
        except BaseException as error:  # as llguidance's panics are
            self.problem = f"{type(error).__name__}: {error}"
        self.seconds = time.perf_counter() - start


def problem_of(matcher: Any) -> str:
    """Why a matcher is in error, without the description of its state; empty if it is not."""
    reason = matcher.get_error().split("\n<")[0].strip()
    return "no text fits" if reason.startswith("NoExtension") else reason


class MaskThreads:
    def __init__(self):
        self._num_threads = min(os.cpu_count() or 1, MAX_THREADS)
        if hasattr(os, "sched_getaffinity"):
            self._num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
        self._pool = ThreadPoolExecutor(self._num_threads, "masks")
        self._num_busy, self._ends = 0, SimpleQueue()

    def begin(self, readers: list[Reader], bits: np.ndarray) -> None:
        """Make the next mask of each in its place among bits, int32 [masks, words]."""
        self._num_busy, self._ends = min(len(readers), self._num_threads), SimpleQueue()
        # Whose mask was slow begins first: it is likely to be slow again.
        todo = iter(sorted(readers, key=lambda reader: reader.seconds, reverse=True))
        if self._num_busy == 1:  # quicker than to wake a thread
            return _make_masks(todo, bits, self._ends)
        for _ in range(self._num_busy):
            self._pool.submit(_make_masks, todo, bits, self._ends)

    def wait(self) -> None:
        """Until all masks are made."""
        for _ in range(self._num_busy):
            self._ends.get()
        self._num_busy = 0

    def close(self) -> None:
        self._pool.shutdown()


def _make_masks(todo: Iterator[Reader], bits: np.ndarray, ends: SimpleQueue) -> None:
    address, num_bytes = bits.ctypes.data, bits.strides[0]
    for reader in todo:  # which several threads take from
        reader.make_mask(address + reader.place * num_bytes, num_bytes)
    ends.put(None)
