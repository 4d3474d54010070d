"""Finds the request that makes steps fail: fewer run than could, and they are admitted one at a time.

recovery.py lowers `max_running` after a step that failed. A prefill that fails then was about one sequence
alone. One more may run with each that ends.
"""

from nanovllm.engine.policies import Admission
from nanovllm.engine.sequence import Sequence


class Isolation(Admission):
    def __init__(self, max_num_seqs: int):
        self.max_running = self.max_num_seqs = max_num_seqs

    def begin(self, num_running: int, max_num_seqs: int) -> int:
        is_isolating = self.max_running < max_num_seqs
        return min(self.max_running, num_running + 1) if is_isolating else max_num_seqs

    def ended(self, seq: Sequence) -> None:
        self.max_running = min(self.max_running + 1, self.max_num_seqs)

    def all_ended(self) -> None:
        self.max_running = self.max_num_seqs
