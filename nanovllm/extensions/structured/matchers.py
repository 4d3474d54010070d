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
    there are several lexers, each known by its first matcher, of which the others are copies.
    """

    def __init__(self, compile_matcher: Callable[[], Any]):
        self._compile_matcher = compile_matcher
        self._compiling = threading.Lock()
        self._max_lexers = 0
        self._num_users: dict[Any, int] = {}  # of each lexer, by its first matcher

    def compile(self) -> None:
        """Once, whichever threads call this. Raises what compiling raises."""
        with self._compiling:
            if self._max_lexers == 0:
                start = time.perf_counter()
                self._num_users[self._compile_matcher()] = 0
                seconds = time.perf_counter() - start
                self._max_lexers = max(1, min(MAX_LEXERS, int(MAX_SECONDS / seconds)))

    def take(self) -> tuple[Any, Any]:
        """A matcher at the beginning of a text, and which lexer it has: the first matcher with the same."""
        if len(self._num_users) < self._max_lexers and all(self._num_users.values()):
            self._num_users[self._compile_matcher()] = 0
        lexer = min(self._num_users, key=self._num_users.__getitem__)
        self._num_users[lexer] += 1
        return lexer, lexer.deep_copy()

    def put_back(self, lexer: Any, matcher: Any) -> None:
        if matcher.is_error():  # perhaps its lexer has grown too large
            self._num_users.pop(lexer, None)
        elif lexer in self._num_users:
            self._num_users[lexer] -= 1


class GrammarState:
    """Follows the text of one sequence through its grammar."""

    def __init__(self, sequence: Sequence, grammar: CompiledGrammar):
        self.sequence, self.grammar = sequence, grammar
        self.lexer, self.matcher = grammar.take()
        self.num_read = sequence.num_prompt_tokens

    def close(self) -> None:
        """Leave the lexer to other sequences."""
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
