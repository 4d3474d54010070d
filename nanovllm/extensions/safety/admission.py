"""Admission control: a waiting sequence runs if it is expected to reach its end beside those that run.

Knows lengths and numbers of blocks, nothing about queues. The idea: a sequence grows by one token a decode
step and gives its blocks back when it ends. So the blocks that are in use rise in number until a sequence
ends, and it is enough to count them in the decode steps in which one does. Two rules are rarely needed: what
requests own of a device's memory is bounded, and after a step that failed fewer run than could.
"""

from bisect import bisect_left, insort
from math import ceil
from typing import Any

from nanovllm.engine.block_manager import BlockManager, Hit
from nanovllm.engine.scheduler import Admission, Scheduler, Verdict
from nanovllm.engine.sequence import Sequence, SequenceStatus

SHARE_WEIGHT = 1 / 32  # how much one request that ends changes `AdmissionControl.share`


class AdmissionControl(Admission):
    """
    A sequence that may end early is expected to draw `share` of the tokens that it may still draw. Measured
    on those that have ended, from the middle of their completions: a running one is there on average.

    At most `max_running` run. Where these are fewer than could, they are admitted one at a time, so that a
    prefill that fails was about one sequence alone (recovery.py), and one more may run with each that ends.

    What all sequences own under the name of `processor` has at most its `max_words` words together.
    """

    def __init__(self, config: Any, processor: Any):
        self.share = 1.0
        self.budget = config.max_num_batched_tokens
        self.max_running = self.max_num_seqs = config.max_num_seqs
        self.processor = processor
        self.held_back: list | None = None  # of the step that the next two are about
        self.num_blocks_at_most = 0  # of all that run and are admitted, if nobody ends before
        self.num_words = 0  # that these own

    def admits(self, seq: Sequence, hit: Hit, state: Scheduler) -> Verdict:
        """Whether the blocks suffice until all have ended if this sequence runs too."""
        pool, running, name = state.block_manager, state.running, self.processor.name
        is_first = state.held_back is not self.held_back  # each step makes a list of its own
        self.held_back = state.held_back
        if is_first:
            self.num_blocks_at_most, self.num_words = len(pool.used_block_ids), 0
            for other in running:
                self.num_blocks_at_most += -(-(other.request.max_num_tokens - 1) // pool.block_size)
                self.num_blocks_at_most -= len(other.block_table)
                self.num_words += len(other.request.own.get(name, ()))
        if self.max_running < self.max_num_seqs and not (is_first and len(running) < self.max_running):
            return Verdict.STOP
        self.num_words += len(seq.request.own.get(name, ()))
        if self.num_words > self.processor.max_words:
            return Verdict.STOP
        # The last token is never written to the cache.
        self.num_blocks_at_most += -(-(seq.request.max_num_tokens - 1) // pool.block_size)
        for block_id in hit.blocks:
            self.num_blocks_at_most -= num_owners(pool, block_id) > 0
        is_full = running and self.num_blocks_at_most > pool.num_blocks
        if is_full and self._most_needed(seq, hit, state) > pool.num_blocks:
            return Verdict.STOP
        return Verdict.ADMIT

    def ended(self, seq: Sequence) -> None:
        self.max_running = min(self.max_running + 1, self.max_num_seqs)
        if seq.finish_reason != "abort" and may_end_early(seq):
            half = seq.num_completion_tokens / 2
            share = half / (seq.request.max_num_tokens - seq.num_prompt_tokens - half)
            self.share += SHARE_WEIGHT * (share - self.share)

    def _most_needed(self, seq: Sequence, hit: Hit, state: Scheduler) -> int:
        """The most blocks that will be in use in any decode step."""
        pool, running, joining = state.block_manager, state.running, [*state.held_back, (seq, hit)]
        size, found = pool.block_size, {block_id for _, its_hit in joining for block_id in its_hit.blocks}

        def is_own(block_id: int) -> bool:
            return num_owners(pool, block_id) == 1 and block_id not in found

        needed, growing = len(pool.used_block_ids), []
        needed -= sum(num_owners(pool, block_id) == 0 for block_id in pool.prefix_cache.pinned)
        for other in running:
            # A table begins with blocks that were given back, then shared ones (nearly always: two sequences
            # may have computed their first block at once, and share a later one). Only exclusively owned
            # blocks count as freed at the end. That it will release others before does not count.
            table = other.block_table
            num_shared = bisect_left(table, True, lo=other.num_released_blocks, key=is_own)
            needed -= len(table) - num_shared
            growing.append((*self._growth(other), num_shared))
        for other, its_hit in joining:
            num_shared = sum(num_owners(pool, block_id) > 0 for block_id in its_hit.blocks)
            growing.append((*self._growth(other), num_shared))
        most, rests = 0, []
        for num_steps, num_tokens, count in sorted(growing, reverse=True):  # those that end last first
            # In its k-th decode step it needs ceil((num_tokens + k - 1) / size) blocks.
            full, rest = divmod(num_tokens + size - 2, size)
            needed += full - count
            insort(rests, rest)
            opened, rest = divmod(num_steps, size)
            most = max(most, needed + len(rests) * (opened + 1) - bisect_left(rests, size - rest))
        return most

    def _growth(self, seq: Sequence) -> tuple[int, int]:
        """The decode steps that a sequence is expected to take, and the tokens it has in the first."""
        is_prefilled = seq.status is SequenceStatus.RUNNING and not seq.num_scheduled_tokens
        num_tokens = seq.num_tokens + (not is_prefilled)
        num_steps = seq.request.max_num_tokens - num_tokens
        if may_end_early(seq):
            num_steps = ceil(num_steps * self.share)
        if not is_prefilled:  # others decode between the chunks of its prompt, so it ends later
            num_steps += (seq.num_tokens - seq.num_computed_tokens) // self.budget
        return num_steps, num_tokens


def may_end_early(seq: Sequence) -> bool:
    """Whether it can end before it has all its tokens."""
    return bool(seq.request.end_token_ids or seq.request.params.stop)


def num_owners(pool: BlockManager, block_id: int) -> int:
    """A pin ends with the step."""
    return pool.blocks[block_id].ref_count - (block_id in pool.prefix_cache.pinned)
