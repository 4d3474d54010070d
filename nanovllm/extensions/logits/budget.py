"""Bounds the memory that biases and bans of all running requests take on a device together."""

from nanovllm.engine.policies import Admission, Admitting, Hit, Verdict
from nanovllm.engine.sequence import Sequence

RULE_WORDS = 1 << 22  # int32


class RuleBudget(Admission):
    def begin(self, num_running: int, max_num_seqs: int) -> int:
        self.num_words: int | None = None  # of those that run and are admitted
        return max_num_seqs

    def admits(self, seq: Sequence, hit: Hit, state: Admitting) -> Verdict:
        if not seq.num_rule_words:
            return Verdict.ADMIT
        if self.num_words is None:
            there = [*state.running, *(other for other, _ in state.waiting)]
            self.num_words = sum(other.num_rule_words for other in there)
        self.num_words += seq.num_rule_words
        return Verdict.ADMIT if self.num_words <= RULE_WORDS else Verdict.STOP
