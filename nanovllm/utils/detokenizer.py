"""Turns tokens into text while they come, for whoever must look at a text that is not finished."""

from typing import Any

INCOMPLETE = "\ufffd"  # what the bytes of half a character decode to
INVALID_BYTE = "<0xFF>"  # a token of vocabularies that write rare characters byte by byte


class Detokenizer:
    """
    `text` is what the tokens so far say, up to the last complete character; its first `num_settled`
    characters stay whatever comes. How a token is written may depend on the one before it, so a few tokens
    that are settled already are always decoded with the new ones, and their text taken off. A run of byte
    tokens is settled when it is over, since one bad byte turns all of it into replacement characters.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.num_tokens = 0
        self.text = ""
        self.num_settled = 0
        self._hidden = set(tokenizer.all_special_ids) if skip_special_tokens else set()
        self._window: list[int] = []  # the tokens that are decoded together
        self._num_settled_tokens = 0  # of these
        invalid = tokenizer.convert_tokens_to_ids(INVALID_BYTE)
        has_bytes = invalid is not None and tokenizer.convert_ids_to_tokens(invalid) == INVALID_BYTE
        self._invalid = [invalid] if has_bytes else []

    def add(self, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)
        seen = [token_id for token_id in token_ids if token_id not in self._hidden]
        if not seen:
            return
        self._window += seen
        settled = self._decode(self._window[: self._num_settled_tokens])
        text = self._decode(self._window)
        self.text = self.text[: self.num_settled] + text[len(settled) :].rstrip(INCOMPLETE)
        if len(text) <= len(settled) or text.endswith(INCOMPLETE):
            return
        if self._decode(self._window + self._invalid).startswith(text):
            self._window = self._window[self._num_settled_tokens :]
            self._num_settled_tokens = len(self._window)
            self.num_settled = len(self.text)

    def num_held_back(self, stops: tuple[str, ...]) -> int:
        """How many characters at the end of the settled text may be the beginning of one of these."""
        settled = self.text[: self.num_settled]
        longest = max(map(len, stops), default=0) - 1
        lengths = range(min(longest, len(settled)), 0, -1)
        return next((n for n in lengths if any(s.startswith(settled[-n:]) for s in stops)), 0)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
