"""Its tokens stay with it: it is computed again from them, and its answer is what it would have been."""

from nanovllm.engine import scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


class Scheduler(scheduler.Scheduler):
    def preempt(self, seq: Sequence) -> None:
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_scheduled_tokens = 0
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1
        self.tell("preempted", seq)
