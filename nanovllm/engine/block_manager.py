"""Pages of KV cache: who owns them, which are free, and which can be found again by their contents.

Knows sequences and numbers of blocks, nothing about tensors. The idea: a full block is identified by a hash
chained over everything before it, so equal prefixes find each other's blocks, and freeing a block only makes
it available: its contents stay findable until the block is handed out again.
"""

from collections import OrderedDict

import numpy as np
import xxhash

from nanovllm.engine.sequence import Sequence


class Block:
    """
    One page. Open (`hash == -1`): being written, owned by one sequence. Closed: full, hashed, immutable,
    shared by `ref_count` sequences, and still findable when that is 0.
    """

    __slots__ = ("block_id", "ref_count", "hash", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1
        self.token_ids: list[int] = []

    def update(self, hash: int, token_ids: list[int]) -> None:
        """Close the block."""
        self.hash = hash
        self.token_ids = token_ids

    def reset(self) -> None:
        """Hand the block out as new: open, one owner."""
        self.ref_count = 1
        self.hash = -1
        self.token_ids = []


class BlockManager:
    """
    Invariants: every block is either free or used; it is free exactly when its `ref_count` is 0; an entry of
    `hash_to_block_id` names a block that holds that hash. `free_block_ids` is ordered, least recently freed
    first. No operation costs more than the blocks it touches.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Start again, whatever state the blocks are in: all are free and hold nothing."""
        self.blocks = [Block(i) for i in range(self.num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.used_block_ids: set[int] = set()

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int = -1) -> int:
        """
        xxh64 of the previous block's hash (8 little-endian bytes, none for the first block) and the ids as
        int64.
        """
        h = xxhash.xxh64()
        if prefix != -1:
            h.update(prefix.to_bytes(8, "little"))
        h.update(np.array(token_ids, dtype="<i8").tobytes())
        return h.intdigest()

    def can_allocate(self, seq: Sequence, cached_blocks: list[int] | None = None) -> bool:
        """
        Whether there are blocks for the whole sequence now. `cached_blocks` is what `find_cached_blocks`
        returns, here and for `allocate`; it is looked up if it is not given.
        """
        cached_blocks = self.find_cached_blocks(seq) if cached_blocks is None else cached_blocks
        return len(self.free_block_ids) >= self.num_new_blocks(seq, cached_blocks)

    def num_new_blocks(self, seq: Sequence, cached_blocks: list[int]) -> int:
        """Blocks that `allocate` would take from the free ones. Hits on used blocks cost none."""
        return seq.num_blocks - sum(self.blocks[i].ref_count > 0 for i in cached_blocks)

    def allocate(self, seq: Sequence, cached_blocks: list[int] | None = None) -> None:
        """
        Give the sequence blocks for all its tokens: shared ones as far as its beginning is cached, then new
        ones.

        The full ones are closed at once, before their contents are computed: a sequence admitted behind this
        one runs in the same step or later, and each layer writes its keys and values before it reads any.
        Blocks that are never computed are never found: after a step that fails all blocks are `reset`, and
        `forget_uncomputed` follows a sequence that ends between two chunks of its prompt.
        """
        assert not seq.block_table
        hits = self.find_cached_blocks(seq) if cached_blocks is None else cached_blocks
        for block_id in hits:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_block_ids[block_id]
                self.used_block_ids.add(block_id)
            block.ref_count += 1
            seq.block_table.append(block_id)
        for i in range(len(hits), seq.num_blocks):
            seq.block_table.append(self._take_free_block())
            if (i + 1) * self.block_size <= len(seq):
                self._close(seq, i)
        seq.num_cached_tokens = seq.num_computed_tokens = len(hits) * self.block_size

    def deallocate(self, seq: Sequence) -> None:
        """Give all blocks back, last to first: a prompt's beginning is the likeliest to be used again."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
        seq.block_table.clear()
        seq.num_cached_tokens = seq.num_computed_tokens = 0

    def forget_uncomputed(self, seq: Sequence) -> None:
        """Make the blocks unfindable that were closed for a prompt but will never be computed."""
        for block_id in seq.block_table[seq.num_computed_tokens // self.block_size :]:
            block = self.blocks[block_id]
            if self.hash_to_block_id.get(block.hash) == block_id:
                del self.hash_to_block_id[block.hash]
            block.update(-1, [])

    def can_append(self, seq: Sequence) -> bool:
        """Whether the sequence's last token has a block, or can get one."""
        return len(seq.block_table) * self.block_size >= len(seq) or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Before the last token is written: open a block if it begins one, close the block that it fills."""
        if len(seq.block_table) * self.block_size < len(seq):
            seq.block_table.append(self._take_free_block())
        elif seq.last_block_num_tokens == self.block_size and len(seq.token_ids) == len(seq):
            self._close(seq, seq.num_blocks - 1)

    def may_close(self, seq: Sequence) -> None:
        """Close the block that the sequence's newest known token fills, if that token is computed already."""
        known = len(seq.token_ids)
        if known % self.block_size == 0 and seq.block_table and seq.num_computed_tokens >= known:
            self._close(seq, known // self.block_size - 1)

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0
        if self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.reset()
        self.used_block_ids.add(block_id)
        return block_id

    def find_cached_blocks(self, seq: Sequence) -> list[int]:
        """
        Blocks that hold the sequence's beginning, up to the first miss and without its last token, which must
        be computed. An empty list if the prompt is to be scored: all of it must be computed for that.
        """
        found: list[int] = []
        if self.enable_prefix_caching and seq.is_scored:
            for i in range((len(seq) - 1) // self.block_size):
                block_id = self.hash_to_block_id.get(self._block_hash(seq, i), -1)
                if block_id == -1 or self.blocks[block_id].token_ids != seq.block(i):
                    break
                found.append(block_id)
        return found

    def _close(self, seq: Sequence, i: int) -> None:
        if self.enable_prefix_caching:
            block_id = seq.block_table[i]
            self.blocks[block_id].update(self._block_hash(seq, i), seq.block(i))
            self.hash_to_block_id[self.blocks[block_id].hash] = block_id

    def _block_hash(self, seq: Sequence, i: int) -> int:
        """
        Hash of the sequence's i-th block, which is full. Hashes are kept: a waiting sequence is looked up
        each time blocks have become free.
        """
        while len(seq.block_hashes) <= i:
            prefix = seq.block_hashes[-1] if seq.block_hashes else -1
            seq.block_hashes.append(self.compute_hash(seq.block(len(seq.block_hashes)), prefix))
        return seq.block_hashes[i]
