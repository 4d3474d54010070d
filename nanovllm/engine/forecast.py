"""Predicts whether a waiting sequence can run to its end beside the running ones without a preemption.

Knows lengths and numbers of blocks, nothing about queues. The idea: a sequence grows by one token a decode
step and gives its blocks back when it ends. So the blocks that are in use rise in number until a sequence
ends, and it is enough to count them in the decode steps in which one does.
"""

from bisect import bisect_left, insort
from math import ceil

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


class Forecast:
    """
    Made for one prefill step. A sequence that may end early is expected to draw `share` of the tokens that it
    may still draw. `budget` is how many prompt tokens a step computes at most.
    """

    def __init__(self, running: list[Sequence], block_manager: BlockManager, share: float, budget: int):
        self.running = running
        self.block_manager = block_manager
        self.share = share
        self.budget = budget
        self.num_blocks_at_most = sum(seq.num_blocks_at_most for seq in running)

    def admits(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        """
        Whether the blocks suffice until all have ended if this sequence, of which the cache has these blocks,
        runs too. If so, the caller adds it to `running`.
        """
        at_most, there = self.num_blocks_at_most + seq.num_blocks_at_most, self.block_manager.num_blocks
        if self.running and at_most > there and self._most_needed(seq, cached_blocks) > there:
            return False
        self.num_blocks_at_most = at_most
        return True

    def _most_needed(self, seq: Sequence, cached_blocks: list[int]) -> int:
        """The most blocks that will be in use in any decode step."""
        blocks, size, found = self.block_manager.blocks, self.block_manager.block_size, set(cached_blocks)

        def is_own(block_id: int) -> bool:
            return blocks[block_id].ref_count == 1 and block_id not in found

        # A table begins with its shared blocks. They count as never given back.
        num_shared = [bisect_left(other.block_table, True, key=is_own) for other in self.running]
        num_own = sum(len(other.block_table) for other in self.running) - sum(num_shared)
        num_shared.append(seq.num_blocks - self.block_manager.num_new_blocks(seq, cached_blocks))
        growths = map(self._growth, [*self.running, seq])
        growing = [(*growth, shared) for growth, shared in zip(growths, num_shared, strict=True)]
        needed = len(self.block_manager.used_block_ids) - num_own
        most, rests = 0, []
        for num_steps, num_tokens, shared in sorted(growing, reverse=True):  # those that end last first
            # In its k-th decode step it needs ceil((num_tokens + k - 1) / size) blocks.
            full, rest = divmod(num_tokens + size - 2, size)
            needed += full - shared
            insort(rests, rest)
            opened, rest = divmod(num_steps, size)
            most = max(most, needed + len(rests) * (opened + 1) - bisect_left(rests, size - rest))
        return most

    def _growth(self, seq: Sequence) -> tuple[int, int]:
        """The decode steps that a sequence is expected to take, and the tokens it has in the first."""
        is_prefilled = seq.status is SequenceStatus.RUNNING and not seq.num_scheduled_tokens
        num_tokens = seq.num_tokens + (not is_prefilled)
        num_steps = seq.max_num_tokens - num_tokens
        if seq.may_end_early:
            num_steps = ceil(num_steps * self.share)
        if not is_prefilled:  # others decode between the chunks of its prompt, so it ends later
            num_steps += (seq.num_tokens - seq.num_computed_tokens) // self.budget
        return num_steps, num_tokens
