"""llguidance's matchers: each follows one text through a grammar and knows what it may go on with."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.validation import shorten

MAX_LEXERS = 16  # of a grammar
MAX_SECONDS = 1.0  # that compiling them takes
# What a user has no use for: a matcher's state, lines of the grammar and what points into them, and the place
# of a schema in the Lark that it has become.
NOISE = re.compile(r"\n<(?s:.*)|^\s*(\d+ \||\^).*|^.*: failed to compile JSON schema: ", re.MULTILINE)


class CompiledGrammar:
    """
    A grammar, compiled when it is first asked for. A matcher follows one text. What it finds out about texts
    is kept in its lexer, which it shares with its copies, and which only one of them can use at a time. So
    there are several lexers, each known by its first matcher, and matchers of texts that have ended are used
    again, since their lexers know more.
    """

    def __init__(self, compile_matcher: Callable[[], Any]):
        self._compile_matcher = compile_matcher
        self._compiling = threading.Lock()
        self._max_lexers = 0
        self._idle: dict[Any, list[Any]] = {}  # of each lexer the matchers that no sequence has

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
        self._idle[first] = [first]

    def take(self) -> tuple[Any, Any]:
        """A matcher at the beginning of a text, and which lexer it has: the first matcher with the same."""
        if len(self._idle) < self._max_lexers and not any(self._idle.values()):
            self._add_lexer()
        lexer = max(self._idle, key=lambda each: len(self._idle[each]))
        idle = self._idle[lexer] = self._idle.pop(lexer)  # the last of those with as many the next time
        matcher = idle.pop() if idle else lexer.deep_copy()
        matcher.reset()
        return lexer, matcher

    def put_back(self, lexer: Any, matcher: Any) -> None:
        if matcher.is_error():  # perhaps its lexer has grown too large
            self._idle.pop(lexer, None)
        elif lexer in self._idle:
            self._idle[lexer].append(matcher)


class GrammarState:
    """Follows the text of one sequence through its grammar."""

    def __init__(self, sequence: Sequence, grammar: CompiledGrammar):
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
