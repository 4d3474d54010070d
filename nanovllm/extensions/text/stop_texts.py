"""Ends completions whose text has come to contain a stop text."""

from typing import Any

from nanovllm.engine.interfaces import Observer
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.text.results import GrowingText


class StopTexts(Observer):
    """Steps call it only while a request has stop texts."""

    def __init__(self) -> None:
        self.texts: dict[Sequence, GrowingText] = {}  # of those that have stop texts

    def started(self, engine: Any) -> None:
        self.engine = engine

    def added(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if seq.request.params.stop:
                self.texts[seq] = GrowingText(self.engine.tokenizer, seq)
                self.after_step = self.find_stops

    def find_stops(self, step: Any) -> None:
        """A token that a step in flight draws for a stopped sequence is thrown away."""
        if not self.texts:
            del self.after_step
            return
        for seq in step.drawing:
            if seq not in self.texts:
                continue
            try:
                if (stop := self.texts[seq].find_stop()) is not None:
                    self.engine.end(seq, "stop", stop)
            except Exception as error:
                error.sequence = seq
                raise

    def ended(self, seq: Sequence) -> None:
        self.texts.pop(seq, None)

    def cleared(self) -> None:
        self.texts.clear()
