"""Finds the request that makes steps fail: fewer run than could, and they are admitted one at a time.

recovery.py lowers the limit after a step that failed. A prefill that fails then was about one sequence alone.
One more may run with each that ends.
"""

from nanovllm.engine.policies import Admission, Admitting, Hit, Verdict
from nanovllm.engine.sequence import Sequence


class Isolation(Admission):
    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.state: Admitting | None = None  # of the step in which it was asked last
        self.limit(max_num_seqs)

    def limit(self, max_running: int) -> None:
        """Let at most so many run."""
        self.max_running = min(max_running, self.max_num_seqs)

    def admits(self, seq: Sequence, hit: Hit, state: Admitting) -> Verdict:
        if self.max_running == self.max_num_seqs:
            return Verdict.ADMIT
        is_first, self.state = state is not self.state, state
        num_running = len(state.running) + len(state.waiting)
        return Verdict.ADMIT if is_first and num_running < self.max_running else Verdict.STOP

    def ended(self, seq: Sequence) -> None:
        self.limit(self.max_running + 1)

    def all_ended(self) -> None:
        self.limit(self.max_num_seqs)
