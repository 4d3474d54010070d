"""Bounds what requests that run together have on a device because of one of their logits processors."""

from nanovllm.engine.policies import Admission, Admitting, Hit, Verdict
from nanovllm.engine.sequence import Sequence


class Budget(Admission):
    """Admits sequences while what they own under a processor's name has at most so many words together."""

    def __init__(self, name: str, max_words: int):
        self.name, self.max_words = name, max_words
        self.state: Admitting | None = None  # of the step that `num_words` is about

    def admits(self, seq: Sequence, hit: Hit, state: Admitting) -> Verdict:
        if not self._words_of(seq):
            return Verdict.ADMIT
        if state is not self.state:
            there = [*state.running, *(other for other, _ in state.waiting)]
            self.state, self.num_words = state, sum(map(self._words_of, there))
        self.num_words += self._words_of(seq)
        return Verdict.ADMIT if self.num_words <= self.max_words else Verdict.STOP

    def _words_of(self, seq: Sequence) -> int:
        return len(seq.request.own.get(self.name, ()))
