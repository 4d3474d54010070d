"""Masks are made in the background by llguidance's threads, which do not need Python's lock."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from nanovllm.engine.sequence import Sequence

MAX_LEXERS = 16  # of a grammar


class Grammar:
    """
    A compiled grammar. A matcher follows one text. What it finds out about texts is kept in its lexer, which
    it shares with its copies, and which only one of them can use at a time. So there are several lexers, and
    matchers of texts that have ended are used again, since their lexers know more.
    """

    def __init__(self, compile_matcher: Callable[[], Any]):
        self._compile = compile_matcher
        first = compile_matcher()
        self._lexers = deque([first])  # a matcher of each
        self._idle = [(first, first)]  # lexers and matchers that no sequence has

    def take(self) -> tuple[Any, Any]:
        """A matcher at the beginning of a text, and which lexer it has: the first matcher with the same."""
        if self._idle:
            lexer, matcher = self._idle.pop()
        elif len(self._lexers) < MAX_LEXERS:
            lexer = matcher = self._compile()
            self._lexers.append(lexer)
        else:
            self._lexers.rotate()
            lexer = self._lexers[0]
            matcher = lexer.deep_copy()
        matcher.reset()
        return lexer, matcher

    def put_back(self, lexer: Any, matcher: Any) -> None:
        if lexer not in self._lexers:
            return
        if matcher.is_error():  # perhaps its lexer has grown too large
            self._lexers.remove(lexer)
            self._idle = [each for each in self._idle if each[0] is not lexer]
        else:
            self._idle.append((lexer, matcher))


class Reader:
    """Follows the text of one sequence through its grammar."""

    def __init__(self, sequence: Sequence):
        self.sequence = sequence
        self.lexer, self.matcher = sequence.grammar.take()
        self.num_read = sequence.num_prompt_tokens

    def close(self) -> None:
        """Leave the matcher to another sequence. No thread may be using it."""
        self.sequence.grammar.put_back(self.lexer, self.matcher)

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
        if self._made is not None:
            self._made.result()
            self._made = None

    def close(self) -> None:
        self._thread.shutdown()
