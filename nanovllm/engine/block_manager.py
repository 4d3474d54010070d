"""Pages of KV cache: who owns them, which are free, and which can be found again by their contents.

Knows sequences and numbers of blocks, nothing about tensors. The idea: a full block is identified by a hash
chained over everything before it, so equal prefixes find each other's blocks, and freeing a block only makes
it available: its contents stay findable until the block is handed out again.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import xxhash

from nanovllm.engine.sequence import Sequence


def tell_nobody(*event: Any) -> None:
    """Events are told this where no observer watches."""


class Block:
    """
    One page. Open (`hash == -1`): being written, owned by one sequence. Closed: full, hashed, immutable,
    shared by `ref_count` sequences, and still findable when that is 0.
    """

    __slots__ = ("block_id", "ref_count", "hash", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.reset()

    def update(self, hash: int, token_ids: list[int]) -> None:
        """Close the block."""
        self.hash = hash
        self.token_ids = token_ids

    def reset(self) -> None:
        """Open the block: it holds nothing that could be found."""
        self.hash = -1
        self.token_ids: list[int] = []


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


class BlockManager:
    """
    Invariants: every block is either free or used; it is free exactly when its `ref_count` is 0; an entry of
    `hash_to_block_id` names a block that holds that hash. `free_block_ids` is ordered, least recently freed
    first. No operation costs more than the blocks it touches.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        prefix_cache: PrefixCache | None = None,
        tell: Callable[..., None] = tell_nobody,
    ):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache or PrefixCache()
        self.tell = tell  # whoever watches
        self.reset()

    def reset(self) -> None:
        """Start again, whatever state the blocks are in: all are free and hold nothing."""
        self.blocks = [Block(i) for i in range(self.num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids = OrderedDict.fromkeys(range(self.num_blocks))
        self.used_block_ids: set[int] = set()
        self.prefix_cache.start(self)

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int = -1) -> int:
        """xxh64 of the previous block's hash (8 bytes, none for the first block) and the ids as int64."""
        data = struct.pack(f"<{len(token_ids)}q", *token_ids)
        if prefix != -1:
            data = prefix.to_bytes(8, "little") + data
        return xxhash.xxh64_intdigest(data)

    def find_block(self, seq: Sequence, i: int) -> int:
        """A block that holds what the sequence's i-th one, a full one, does, after the same tokens; or -1."""
        block_id = self.hash_to_block_id.get(self._block_hash(seq, i), -1)
        if block_id != -1 and self.blocks[block_id].token_ids == seq.block(i):
            return block_id
        return -1

    def can_allocate(self, seq: Sequence, hit: Hit) -> bool:
        """Whether there are blocks for the whole sequence now. `hit` is what `PrefixCache.find` returns."""
        num_used = len(self.used_block_ids.intersection(hit.blocks))  # these cost no free block
        return len(self.free_block_ids) >= seq.num_blocks + len(hit.pins) - num_used

    def allocate(self, seq: Sequence, hit: Hit) -> None:
        """
        Give the sequence blocks for all its tokens: shared ones as far as its beginning is cached, then new
        ones.

        The full ones are closed at once, before their contents are computed: a sequence admitted behind this
        one runs in the same step or later, and each layer writes its keys and values before it reads any.
        Blocks that are never computed are never found: after a step that fails all blocks are `reset`, and
        `forget_uncomputed` follows a sequence that ends between two chunks of its prompt.
        """
        assert not seq.block_table
        seq.num_cached_tokens = seq.num_computed_tokens = hit.num_tokens
        for block_id in (*hit.blocks, *hit.pins):
            self._take(block_id)
        seq.block_table += hit.blocks
        for i in range(seq.num_cached_blocks, seq.num_blocks):
            self._open_block(seq)
            if (i + 1) * self.block_size <= seq.num_tokens:
                self._close(seq, i)
        self.prefix_cache.allocated(seq, hit)

    def deallocate(self, seq: Sequence) -> None:
        """Give all blocks back, last to first: a prompt's beginning is the likeliest to be used again."""
        self.prefix_cache.leaving(seq)
        self.release(seq, len(seq.block_table))
        seq.block_table.clear()
        seq.num_released_blocks = 0
        seq.num_cached_tokens = seq.num_computed_tokens = 0

    def release(self, seq: Sequence, end: int) -> None:
        """Give back the first `end` blocks, which no layer reads again. In the table nobody looks at them."""
        for block_id in reversed(seq.block_table[seq.num_released_blocks : end]):
            self.give_back(block_id)
            self.tell("block", "freed", block_id, seq)
        seq.num_released_blocks = end

    def forget_uncomputed(self, seq: Sequence) -> None:
        """Make the blocks unfindable that were closed for a prompt but will never be computed."""
        for block_id in seq.block_table[seq.num_computed_tokens // self.block_size :]:
            self._forget(block_id)

    def can_append(self, seq: Sequence) -> bool:
        """Whether the sequence's last token has a block, or can get one."""
        return len(seq.block_table) >= seq.num_blocks or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Before the last token is written: open a block if it begins one, close the block that it fills."""
        if len(seq.block_table) < seq.num_blocks:
            self._open_block(seq)
        elif seq.last_block_num_tokens == self.block_size and len(seq.token_ids) == seq.num_tokens:
            self.close_newest(seq)

    def close_newest(self, seq: Sequence) -> None:
        """Close the block that the newest known token fills. It is written by this step or one before."""
        end = len(seq.token_ids)
        self._close(seq, end // self.block_size - 1)
        self.prefix_cache.written(seq, end - self.block_size, end)

    def _block_hash(self, seq: Sequence, i: int) -> int:
        """
        Hash of the sequence's i-th block, which is full. Hashes are kept: a waiting sequence is looked up
        each time blocks have become free.
        """
        hashes = seq.block_hashes
        while len(hashes) <= i:
            # The first block has no hash before it.
            hashes.append(self.compute_hash(seq.block(len(hashes)), *hashes[-1:]))
        return hashes[i]

    def _take(self, block_id: int) -> None:
        """One sequence more has the block."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
            self.used_block_ids.add(block_id)
        block.ref_count += 1

    def give_back(self, block_id: int) -> None:
        """One sequence less has the block."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self.used_block_ids.remove(block_id)
            self.free_block_ids[block_id] = None

    def _open_block(self, seq: Sequence) -> None:
        """The sequence's table gets one block more, a free one."""
        block_id = self.prefix_cache.evict()
        self._forget(block_id)
        self._take(block_id)
        seq.block_table.append(block_id)
        self.tell("block", "taken", block_id, seq)

    def _close(self, seq: Sequence, i: int) -> None:
        """Have the sequence's i-th block, which is full, found by its hash."""
        if self.enable_prefix_caching:
            block = self.blocks[seq.block_table[i]]
            block.update(self._block_hash(seq, i), seq.block(i))
            self.hash_to_block_id[block.hash] = block.block_id
            self.tell("block", "closed", block.block_id, seq)

    def _forget(self, block_id: int) -> None:
        """Make the block unfindable."""
        block = self.blocks[block_id]
        if self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
            self.tell("block", "forgotten", block_id, None)
        self.prefix_cache.forgotten(block_id)
        block.reset()
