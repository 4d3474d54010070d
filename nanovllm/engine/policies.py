"""The two interfaces of scheduling: what of a prompt the KV cache has, and who may run.

The classes here are the plain ones, of which the parts that assembly.py makes are subclasses. Rank 0's host
has them, beside the Scheduler and its BlockManager, so nothing here knows tensors.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from nanovllm.engine.sequence import Sequence


@dataclass
class Hit:
    """What the KV cache has of a sequence's beginning."""

    blocks: list[int]  # whole ones, which the sequence is going to share
    num_tokens: int  # that need not be computed: those of the blocks, and what a PrefixCache adds to them
    pins: tuple[int, ...] = ()  # free blocks that the step reads: used until the PrefixCache gives them back


class PrefixCache:
    """
    Finds what the KV cache has of a prompt. This one shares whole blocks, which the BlockManager finds by
    their hashes. All but `receive` is called on rank 0's host, with sequences that have blocks, `find` aside.
    """

    pinned: Collection[int] = ()  # blocks that are used by the step that is being scheduled alone

    def start(self, pool: Any) -> None:
        """All blocks of `pool`, a BlockManager, are free and hold nothing: at first, and after a failure."""
        self.pool = pool

    def find(self, seq: Sequence) -> Hit:
        """Of a waiting sequence. Changes nothing; at least one token is left to compute."""
        size, blocks = self.pool.block_size, []
        for i in range(self.max_cached(seq) // size):
            if (block_id := self.pool.find_block(seq, i)) == -1:
                break
            blocks.append(block_id)
        return Hit(blocks, len(blocks) * size)

    def max_cached(self, seq: Sequence) -> int:
        """How many tokens may be found; the next one is computed from the last. A part may ask for less."""
        return seq.num_tokens - 1

    def evict(self) -> int:
        """Which free block is handed out next: the least recently freed one."""
        return next(iter(self.pool.free_block_ids))

    def forgotten(self, block_id: int) -> None:
        """What this block held cannot be found any more."""

    def allocated(self, seq: Sequence, hit: Hit) -> None:
        """The sequence has got its blocks, of which those behind `hit` are to be computed."""

    def written(self, seq: Sequence, start: int, end: int) -> None:
        """
        A step has been enqueued, or will be next, after which the cache holds tokens start..end: they fill a
        block of a completion.
        """

    def leaving(self, seq: Sequence) -> None:
        """The sequence is about to give its blocks back."""

    def prepare(self, sequences: list[Sequence]) -> Any:
        """
        What every rank must know before it prefills these, to be pickled; None: nothing. That step will be
        enqueued next, and the cache holds what it computes then: each one's next `num_scheduled_tokens`.
        """

    def receive(self, message: Any, kv_cache: Any) -> None:
        """Do what `prepare` said. Called on every rank, before the step computes anything."""


class Verdict(IntEnum):
    """Of several the highest counts."""

    ADMIT = 0
    WAIT = 1  # not in this step, but those behind it may be admitted. Nobody has to wait twice
    STOP = 2  # neither it nor those behind it, before a sequence ends or gives blocks back


class Admission:
    """
    Has a say in which sequences run. All are asked, on rank 0's host; one that has no free blocks, no slot or
    no room in the step's tokens is not admitted whatever they say.
    """

    def admits(self, seq: Sequence, hit: Hit, state: Any) -> Verdict:
        """
        Whether this sequence, the first of those that wait, may run. If all say so, it does. `state` is the
        Scheduler; its `running` has those that are already admitted, and `held_back`, a new list in each
        step, those that join in the next one.
        """
        return Verdict.ADMIT

    def ended(self, seq: Sequence) -> None:
        """The sequence has ended; its `finish_reason` says why."""
