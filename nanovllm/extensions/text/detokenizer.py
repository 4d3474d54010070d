"""Turns tokens into text: single tokens, and a completion's tokens while they are drawn, for streaming and
stop texts.
"""

import codecs
import weakref
from typing import Any

INCOMPLETE = "\ufffd"  # what the bytes of half a character decode to
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # the byte tokens of vocabularies that have such
KEPT = 8  # tokens; a window with twice as many unsettled ones is cut, so that decoding it stays cheap


class Vocabulary(dict[int, str]):
    """
    The text of each single token, decoded when it is asked for first. `hidden` are the special tokens that
    skip_special_tokens skips. `byte_of` has the byte of each byte token; `runs_are_text` says whether a run
    of these becomes text as a whole, and nothing but replacement characters if a byte of it is wrong.
    """

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = weakref.proxy(tokenizer)  # a strong reference would keep it in _vocabularies
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.hidden = {i for i in special if not tokenizer.decode([i], skip_special_tokens=True)}
        ids = tokenizer.convert_tokens_to_ids(BYTES)
        self.byte_of = {
            i: byte
            for byte, i in enumerate(ids)
            if i is not None and tokenizer.convert_ids_to_tokens(i) == BYTES[byte]
        }
        self.invalid = [i for i, byte in self.byte_of.items() if byte == 0xFF]  # never part of UTF-8
        self.runs_are_text = False
        if len(self.byte_of) == len(BYTES):
            euro = [ids[byte] for byte in "€".encode()]
            texts = tokenizer.decode(euro), tokenizer.decode(euro + self.invalid)
            self.runs_are_text = texts == ("€", 4 * INCOMPLETE)

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.decode([token_id])
        return text

    def is_unknown(self, token_id: int) -> bool:
        """Whether no token has this id; decoding skips it."""
        return not self[token_id] and self._tokenizer.convert_ids_to_tokens(token_id) is None


_vocabularies: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """One for all requests; it lives as long as the tokenizer."""
    if (found := _vocabularies.get(tokenizer)) is None:
        found = _vocabularies[tokenizer] = Vocabulary(tokenizer)
    return found


class ByteRun:
    """
    Byte tokens in a row, of which more may come. `text` is the text in front of them and, while their bytes
    are valid, their own. Nothing of the run shows once a byte was wrong, or while a character is incomplete.
    """

    def __init__(self, before: str):
        self.before = self.text = before
        self._is_valid = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def add(self, byte: int) -> bool:
        """Whether the run shows with this byte."""
        try:
            self.text += self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._is_valid = False
        return self._is_valid and not self._utf8.getstate()[0]


class Detokenizer:
    """
    `text` is the text of the tokens so far, up to the last complete character. Its first `num_settled`
    characters will not change, whatever tokens come. A token's text may depend on the token before it, so a
    few settled tokens are always decoded together with the new ones, and their text is cut off. A run of byte
    tokens is settled when it is over, since one wrong byte turns all of it into replacement characters.

    The time that a token takes does not depend on how many came since something was settled.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.num_tokens = self.num_settled = 0
        self.text = ""
        self._vocabulary = vocabulary_of(tokenizer)
        self._hidden = self._vocabulary.hidden if skip_special_tokens else set()
        self._window: list[int] = []  # the tokens that are decoded together
        self._num_context_tokens = 0  # how many of these are settled ones, in front of the new ones
        self._num_context = 0  # how many characters these have
        self._decided = ""  # text between the settled text and the new tokens' text
        self._run: ByteRun | None = None  # at the end of the window

    def add(self, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)
        for token_id in token_ids:
            if token_id not in self._hidden and not self._vocabulary.is_unknown(token_id):
                self._add(token_id)

    def settled_text(self, stops: tuple[str, ...]) -> str:
        """The settled text, without characters at its end that may begin one of these stop texts."""
        settled = self.text[: self.num_settled]
        longest = max(map(len, stops), default=0) - 1
        for i in range(max(0, len(settled) - longest), len(settled)):
            if any(stop.startswith(settled[i:]) for stop in stops):
                return settled[:i]
        return settled

    def _add(self, token_id: int) -> None:
        self._window.append(token_id)
        byte = self._vocabulary.byte_of.get(token_id)
        if byte is None:
            self._run = None
        elif self._vocabulary.runs_are_text:
            return self._add_byte(byte)
        text = self._decode(self._window)
        new = self._new_of(text)
        self._show(new)
        whole = new and not new.endswith(INCOMPLETE)
        if whole and self._decode(self._window + self._vocabulary.invalid).startswith(text):
            self._settle()
        elif byte is None and len(self._window) - self._num_context_tokens >= 2 * KEPT:
            self._cut(text)

    def _add_byte(self, byte: int) -> None:
        """The last token is this byte. A run of them is read as bytes."""
        if self._run is None:
            self._run = ByteRun(self._new_of(self._decode(self._window[:-1])))
        run = self._run
        is_first = run.text == run.before
        is_shown = run.add(byte)
        if is_first and is_shown:  # the tokenizer may begin a text in its own way, such as without a space
            run.text = self._new_of(self._decode(self._window))
        self._show(run.text if is_shown else run.before)

    def _new_of(self, text: str) -> str:
        """What follows the settled text, if this is the window's text."""
        return self._decided + text[self._num_context :]

    def _show(self, new: str) -> None:
        self.text = self.text[: self.num_settled] + new.rstrip(INCOMPLETE)

    def _settle(self) -> None:
        self.num_settled = len(self.text)
        self._window = self._window[self._num_context_tokens :]
        self._num_context_tokens = len(self._window)
        self._num_context = len(self._decode(self._window))
        self._decided = ""

    def _cut(self, text: str) -> None:
        """
        Take all but a few tokens off the window, if the rest decodes to the same text without them: their
        text is decided then, although it is not settled.
        """
        window = self._window[-2 * KEPT :]
        # The cut may be inside a character: what comes before it of that character is not decided.
        sure = self._window[:-KEPT], window[:KEPT]
        before, known = (self._decode(token_ids).removesuffix(INCOMPLETE) for token_ids in sure)
        if before + self._decode(window)[len(known) :] == text:
            self._decided = self._new_of(before)
            self._window = window
            self._num_context_tokens = KEPT
            self._num_context = len(known)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
