"""What happens to a sequence when there is no block left?

Write `preempt`. It loses its blocks and its slot (`self._release(seq)` gives both back), it is WAITING again,
it computes nothing in this step, and it is the first of all that wait, so that nobody who came later
overtakes it. `self.waiting` is an OrderedDict from sequences to None. Count it in `self.num_preemptions`, and
tell who watches: `self.tell("preempted", seq)`.
"""

from nanovllm.engine import scheduler
from nanovllm.engine.sequence import Sequence


class Scheduler(scheduler.Scheduler):
    def preempt(self, seq: Sequence) -> None:
        raise NotImplementedError("exercise 5")
