"""Turns tokens into text while they come, for whoever must look at a text that is not finished."""

from typing import Any

INCOMPLETE = "\ufffd"  # what the bytes of half a character decode to


class Detokenizer:
    """
    The text of one sequence's tokens, piece by piece. A piece is held back until its last character is
    complete. How a token is written may depend on the one before it, so a few tokens that are shown already
    are always decoded with the new ones, and their text taken off.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.token_ids: list[int] = []
        self.text = ""
        self._first = 0  # of the tokens that are decoded together
        self._num_shown = 0

    def add(self, token_ids: list[int]) -> str:
        """What these tokens add to `text`."""
        self.token_ids += token_ids
        shown = self._decode(self.token_ids[self._first : self._num_shown])
        text = self._decode(self.token_ids[self._first :])
        if len(text) <= len(shown) or text.endswith(INCOMPLETE):
            return ""
        self._first, self._num_shown = self._num_shown, len(self.token_ids)
        piece = text[len(shown) :]
        self.text += piece
        return piece

    def num_held_back(self, stops: tuple[str, ...]) -> int:
        """How many characters at the end of `text` may be the beginning of one of these."""
        longest = max(map(len, stops), default=0) - 1
        lengths = range(min(longest, len(self.text)), 0, -1)
        return next((n for n in lengths if any(s.startswith(self.text[-n:]) for s in stops)), 0)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
