"""llguidance's matchers: each follows one text through a grammar and knows what it may go on with."""

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.validation import shorten

MAX_LEXERS = 16  # of a grammar
MAX_SECONDS = 1.0  # that compiling them takes
# What a user has no use for: a matcher's state, lines of the grammar and what points into them, and the place
# of a schema in the Lark that it has become.
NOISE = re.compile(r"\n<(?s:.*)|^\s*(\d+ \||\^).*|^.*: failed to compile JSON schema: ", re.MULTILINE)


@dataclass(eq=False)
class Lexer:
    """What matchers that are copies of each other share. Only one of them can use it at a time."""

    first: Any  # the matcher that the others are copies of
    idle: list[Any]  # matchers that no sequence has


class Grammar:
    """
    A grammar, compiled when it is first asked for. A matcher follows one text; what it finds out about texts
    is kept in its lexer. So there are several lexers, for texts that are followed at the same time, and
    matchers of texts that have ended are used again, since their lexers know more.
    """

    def __init__(self, compile_matcher: Callable[[], Any]):
        self._compile_matcher = compile_matcher
        self._compiling = threading.Lock()
        self._lexers: deque[Lexer] = deque()
        self._max_lexers = 0

    def compile(self) -> None:
        """Once, whichever threads call this. Raises what compiling raises."""
        with self._compiling:
            if self._max_lexers == 0:
                start = time.perf_counter()
                self._add_lexer()
                seconds = time.perf_counter() - start
                self._max_lexers = max(1, min(MAX_LEXERS, int(MAX_SECONDS / seconds)))

    def _add_lexer(self) -> None:
        first = self._compile_matcher()
        self._lexers.append(Lexer(first, [first]))

    def take(self) -> tuple[Lexer, Any]:
        """A matcher at the beginning of a text, and its lexer."""
        if len(self._lexers) < self._max_lexers and not any(lexer.idle for lexer in self._lexers):
            self._add_lexer()
        self._lexers.rotate()  # of lexers with equally many idle matchers another one each time
        lexer = max(self._lexers, key=lambda each: len(each.idle))
        matcher = lexer.idle.pop() if lexer.idle else lexer.first.deep_copy()
        matcher.reset()
        return lexer, matcher

    def put_back(self, lexer: Lexer, matcher: Any) -> None:
        if not matcher.is_error():
            lexer.idle.append(matcher)
        elif lexer in self._lexers:  # perhaps it has grown too large
            self._lexers.remove(lexer)


class Reader:
    """Follows the text of one sequence through its grammar."""

    def __init__(self, sequence: Sequence, grammar: Grammar):
        self.sequence, self.grammar = sequence, grammar
        self.lexer, self.matcher = grammar.take()
        self.num_read = sequence.num_prompt_tokens

    def close(self) -> None:
        """Leave the matcher to another sequence."""
        self.grammar.put_back(self.lexer, self.matcher)

    def take_new(self) -> list[int]:
        """The tokens of the sequence that have not been read, which the caller reads now."""
        new = self.sequence.token_ids[self.num_read :]
        self.num_read += len(new)
        return new


def problem_of(matcher: Any) -> str:
    """Why a matcher is in error; empty if it is not."""
    reason = " ".join(NOISE.sub("", matcher.get_error()).split())
    return "no text fits" if reason.startswith("NoExtension") else shorten(reason)
