"""A block is closed by its last token only if that token has been computed: the newest one never has."""

from collections.abc import Collection

from nanovllm.engine import scheduler
from nanovllm.engine.sequence import Sequence


class Scheduler(scheduler.Scheduler):
    def postprocess(self, sequences: Collection[Sequence], token_ids: list[int]) -> list[Sequence]:
        finished = []
        for seq, token_id in zip(sequences, token_ids, strict=False):
            if seq.is_finished:
                continue
            seq.append_token(token_id)
            self.num_drawn_tokens += 1
            length = len(seq.token_ids)
            if length % self.block_size == 0 and seq.num_computed_tokens >= length:
                self.block_manager.close_newest(seq)
            if token_id in seq.request.end_token_ids:
                own = token_id in seq.request.params.stop_token_ids
                self.end(seq, "stop", token_id if own else None)
            elif length == seq.request.max_num_tokens:
                self.end(seq, "length")
            if seq.is_finished:
                finished.append(seq)
        return finished
