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
    Made for one prefill step, before it admits anybody. A sequence that may end early is expected to draw
    `share` of the tokens that it may still draw. `budget` is how many prompt tokens a step computes at most.
    """

    def __init__(self, running: list[Sequence], block_manager: BlockManager, share: float, budget: int):
        self.running = running
        self.block_manager = block_manager
        self.share = share
        self.budget = budget
        self.held_back: list[tuple[Sequence, list[int]]] = []  # these join in the next step, with their hits
        growths = (seq.num_blocks_at_most - len(seq.block_table) for seq in running)
        self.num_blocks_at_most = len(block_manager.used_block_ids) + sum(growths)

    def admits(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        """
        Whether the blocks suffice until all have ended if this sequence, of which the cache has these blocks,
        runs too. If so, the caller adds it to `running` or `held_back`.
        """
        there = self.block_manager.num_blocks
        at_most = self.num_blocks_at_most + seq.num_blocks_at_most - self._num_shared(cached_blocks)
        if self.running and at_most > there and self._most_needed(seq, cached_blocks) > there:
            return False
        self.num_blocks_at_most = at_most
        return True

    def _num_owners(self, block_id: int) -> int:
        """A pin ends with the step."""
        return self.block_manager.blocks[block_id].ref_count - (block_id in self.block_manager.pinned)

    def _num_shared(self, cached_blocks: list[int]) -> int:
        return sum(self._num_owners(block_id) > 0 for block_id in cached_blocks)

    def _most_needed(self, seq: Sequence, cached_blocks: list[int]) -> int:
        """The most blocks that will be in use in any decode step."""
        manager, joining = self.block_manager, [*self.held_back, (seq, cached_blocks)]
        size, found = manager.block_size, {block_id for _, cached in joining for block_id in cached}

        def is_own(block_id: int) -> bool:
            return self._num_owners(block_id) == 1 and block_id not in found

        # A table begins with blocks that are not its own any more, then shared ones, which count as never
        # given back. That it will release others does not count.
        num_shared = [
            bisect_left(other.block_table, True, lo=other.num_released_blocks, key=is_own)
            for other in self.running
        ]
        num_own = sum(len(other.block_table) for other in self.running) - sum(num_shared)
        num_shared += [self._num_shared(cached) for _, cached in joining]
        growths = map(self._growth, [*self.running, *(other for other, _ in joining)])
        growing = [(*growth, shared) for growth, shared in zip(growths, num_shared, strict=True)]
        needed = len(manager.used_block_ids) - num_own
        needed -= sum(self._num_owners(block_id) == 0 for block_id in manager.pinned)
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
