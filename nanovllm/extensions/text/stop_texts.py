"""Ends completions whose text has come to contain a stop text."""

from typing import Any

from nanovllm.engine.interfaces import Observer
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.text.results import GrowingText


class StopTexts(Observer):
    def __init__(self) -> None:
        self.texts: dict[Sequence, GrowingText] = {}  # of those that have stop texts

    def started(self, engine: Any) -> None:
        self.engine = engine

    def added(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if seq.request.params.stop:
                self.texts[seq] = GrowingText(self.engine.tokenizer, seq)

    def after_step(self, step: Any) -> None:
        """A token that a step in flight draws for a stopped sequence is thrown away."""
        for seq in [seq for seq in self.texts if seq in step.drawing]:
            try:
                # An observer may end others when it hears of an end.
                if seq in self.texts and (stop := self.texts[seq].find_stop()) is not None:
                    self.engine.end(seq, "stop", stop)
            except Exception as error:
                error.sequence = seq
                raise

    def ended(self, seq: Sequence) -> None:
        self.texts.pop(seq, None)

    def cleared(self) -> None:
        self.texts.clear()
