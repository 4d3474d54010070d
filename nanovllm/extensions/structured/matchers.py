"""llguidance's matchers: each follows one text through a grammar and knows what it may go on with."""

import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.utils.validation import shorten

MAX_LEXERS = 16  # of a grammar
EXCERPT = re.compile(r"\s*(\d+ \||\^)")  # a line of the grammar, or what points into it
MAX_SECONDS = 1.0  # that compiling them takes


class Grammar:
    """
    A compiled grammar. A matcher follows one text. What it finds out about texts is kept in its lexer, which
    it shares with its copies, and which only one of them can use at a time. So there are several lexers, and
    matchers of texts that have ended are used again, since their lexers know more.
    """

    def __init__(self, compile_matcher: Callable[[], Any]):
        self._compile, start = compile_matcher, time.perf_counter()
        first = compile_matcher()
        seconds = time.perf_counter() - start
        self._max_lexers = max(1, min(MAX_LEXERS, int(MAX_SECONDS / seconds)))
        self._lexers = deque([first])  # a matcher of each
        self._idle = [(first, first)]  # lexers and matchers that no sequence has

    def take(self) -> tuple[Any, Any]:
        """A matcher at the beginning of a text, and which lexer it has: the first matcher with the same."""
        if self._idle:
            lexer, matcher = self._idle.pop()
        elif len(self._lexers) < self._max_lexers:
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
    """
    Why a matcher is in error, without the description of its state and the lines of Lark that a schema has
    become; empty if it is not.
    """
    lines = matcher.get_error().split("\n<")[0].splitlines()
    reason = " ".join(line.strip() for line in lines if not EXCERPT.match(line))
    reason = reason.split(": failed to compile JSON schema: ")[-1].strip()
    return "no text fits" if reason.startswith("NoExtension") else shorten(reason)
