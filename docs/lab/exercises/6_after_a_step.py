"""Who ends with the tokens of a step?

Write `postprocess`. For each sequence, in order, with its token: one that is FINISHED had ended by the token
before, which nobody knew when this step began; its token is thrown away. Any other one gets its token
(`seq.append_token`).
If it fills a block which has been computed to its end, the block is closed
(`self.block_manager.close_newest(seq)`). And it may end (`self.end(seq, reason, stop_reason)`): with "stop"
if the token is in `seq.request.end_token_ids` (the stop_reason is the token if it is one of the request's
own, `seq.request.params.stop_token_ids`, else None); with "length" if it has `seq.request.max_num_tokens`
tokens now. Count the tokens that were not thrown away in `self.num_drawn_tokens`. Return the sequences that
end here.
"""

from collections.abc import Collection

from nanovllm.engine import scheduler
from nanovllm.engine.sequence import Sequence


class Scheduler(scheduler.Scheduler):
    def postprocess(self, sequences: Collection[Sequence], token_ids: list[int]) -> list[Sequence]:
        raise NotImplementedError("exercise 6")
