"""Pages of KV cache: who owns them, which are free, and which can be found again by their contents.

Knows sequences and numbers of blocks, nothing about tensors. The idea: a full block is identified by a hash
chained over everything before it, so equal prefixes find each other's blocks, and freeing a block only makes
it available: its contents stay findable until the block is handed out again. Where two prompts part ways
inside a block, the second one has a copy made of what they have in common.
"""

from collections import OrderedDict
from typing import NamedTuple

import xxhash

from nanovllm.engine.prefix_index import PrefixIndex
from nanovllm.engine.sequence import TOKEN_BYTES, BlockCopy, Sequence, pack, unpack


class Block:
    """
    One page. Open (`hash == -1`): being written, owned by one sequence. Closed: full, hashed, immutable,
    shared by `ref_count` sequences, and still findable when that is 0. `token_ids` are those that can be
    found in it.
    """

    __slots__ = ("block_id", "ref_count", "hash", "packed")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1
        self.packed = b""  # its tokens, see sequence.pack

    @property
    def token_ids(self) -> list[int]:
        return unpack(self.packed).tolist()

    def update(self, hash: int, packed: bytes) -> None:
        """Close the block, or (hash -1) say what of it can be found while it is open."""
        self.hash = hash
        self.packed = packed

    def reset(self) -> None:
        """Hand the block out as new: open, one owner."""
        self.ref_count = 1
        self.update(-1, b"")


class PrefixMatch(NamedTuple):
    """What the cache has of a sequence's beginning."""

    blocks: list[int]  # whole ones
    source: int = -1  # a block whose first `num_copied` tokens follow them, to be copied; -1: none
    num_copied: int = 0
    num_computing: int = 0  # how many could be copied after the step that is being scheduled


class BlockManager:
    """
    Invariants: every block is either free or used; it is free exactly when its `ref_count` is 0; an entry of
    `hash_to_block_id` names a block that holds that hash. `free_block_ids` is ordered, least recently freed
    first. A block that can be found is in `computing` until the step that computes it has been enqueued, and
    in `computed` then. A free block that is copied from is `pinned` until the copy has been enqueued. No
    operation costs more than the blocks it touches.
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
        self.computed, self.computing = PrefixIndex(), PrefixIndex()
        self.pinned: set[int] = set()

    @staticmethod
    def compute_hash(token_ids: list[int] | bytes, prefix: int = -1) -> int:
        """
        xxh64 of the previous block's hash (8 little-endian bytes, none for the first block) and the ids as
        int64 (bytes are packed ids).
        """
        packed = token_ids if isinstance(token_ids, bytes) else pack(token_ids)
        return xxhash.xxh64_intdigest((prefix.to_bytes(8, "little") if prefix != -1 else b"") + packed)

    def can_allocate(self, seq: Sequence, match: PrefixMatch | None = None) -> bool:
        """
        Whether there are blocks for the whole sequence now. `match` is what `find_prefix` returns, here and
        for `allocate`; it is looked up if it is not given.
        """
        match = self.find_prefix(seq) if match is None else match
        return len(self.free_block_ids) >= self.num_new_blocks(seq, match.blocks)

    def num_new_blocks(self, seq: Sequence, cached_blocks: list[int]) -> int:
        """Blocks that `allocate` would take from the free ones. Hits on used blocks cost none."""
        return seq.num_blocks - sum(self.blocks[i].ref_count > 0 for i in cached_blocks)

    def allocate(self, seq: Sequence, match: PrefixMatch | None = None) -> None:
        """
        Give the sequence blocks for all its tokens: shared ones as far as its beginning is cached, then new
        ones, the first of which may begin with tokens copied from another block.

        The full ones are closed at once, before their contents are computed: a sequence admitted behind this
        one runs in the same step or later, and each layer writes its keys and values before it reads any.
        Blocks that are never computed are never found: after a step that fails all blocks are `reset`, and
        `forget_uncomputed` follows a sequence that ends between two chunks of its prompt.
        """
        assert not seq.block_table
        match = self.find_prefix(seq) if match is None else match
        num_cached_tokens = len(match.blocks) * self.block_size + match.num_copied
        seq.num_cached_tokens = seq.num_computed_tokens = num_cached_tokens
        for block_id in match.blocks:
            self._share(block_id)
            seq.block_table.append(block_id)
        if match.num_copied and not self.blocks[match.source].ref_count:
            self._share(match.source)
            self.pinned.add(match.source)
        for i in range(seq.num_cached_blocks, seq.num_blocks):
            seq.block_table.append(self._take_free_block())
            self._list(seq, i, self.computing)
        if match.num_copied:
            target = seq.block_table[seq.num_cached_blocks]
            seq.block_copy = BlockCopy(match.source, target, match.num_copied)

    def note_computed(self, seq: Sequence, start: int) -> None:
        """A prefill step has been enqueued that computes the sequence's tokens from this one on."""
        end, size = seq.num_computed_tokens, self.block_size
        if self.enable_prefix_caching:
            stop = seq.num_blocks if end == seq.num_tokens else end // size
            for block_id in seq.block_table[start // size : stop]:
                self.computing.move(block_id, self.computed)

    def end_copies(self) -> bool:
        """The copies of the admitted have been enqueued. Returns whether blocks have become free by that."""
        pinned, self.pinned = self.pinned, set()
        for block_id in pinned:
            self._give_back(block_id)
        return bool(pinned)

    def deallocate(self, seq: Sequence) -> None:
        """Give all blocks back, last to first: a prompt's beginning is the likeliest to be used again."""
        end = min(len(seq.token_ids), seq.num_computed_tokens)
        if end % self.block_size and self.blocks[seq.block_table[end // self.block_size]].hash == -1:
            self._list(seq, end // self.block_size, self.computed, end)
        for block_id in reversed(seq.block_table[seq.num_released_blocks :]):
            self._give_back(block_id)
        seq.block_table.clear()
        seq.num_released_blocks = 0
        seq.num_cached_tokens = seq.num_computed_tokens = 0

    def release(self, seq: Sequence, num_tokens: int) -> bool:
        """
        Give back the blocks of the sequence's first tokens, so many, which no layer will read again. They
        stay in its table, where nobody looks. Returns whether there are any.
        """
        first, end = seq.num_released_blocks, num_tokens // self.block_size
        for block_id in reversed(seq.block_table[first : max(first, end)]):
            self._give_back(block_id)
        seq.num_released_blocks = max(first, end)
        return first < end

    def forget_uncomputed(self, seq: Sequence) -> None:
        """Make the blocks unfindable that were closed for a prompt but will never be computed."""
        for block_id in seq.block_table[seq.num_computed_tokens // self.block_size :]:
            self._forget(self.blocks[block_id])

    def can_append(self, seq: Sequence) -> bool:
        """Whether the sequence's last token has a block, or can get one."""
        return len(seq.block_table) * self.block_size >= len(seq) or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Before the last token is written: open a block if it begins one, close the block that it fills."""
        if len(seq.block_table) * self.block_size < len(seq):
            seq.block_table.append(self._take_free_block())
        elif seq.last_block_num_tokens == self.block_size and len(seq.token_ids) == len(seq):
            self._list(seq, seq.num_blocks - 1, self.computed)

    def may_close(self, seq: Sequence) -> None:
        """Close the block that the sequence's newest known token fills, if that token is computed already."""
        known = len(seq.token_ids)
        if known % self.block_size == 0 and seq.block_table and seq.num_computed_tokens >= known:
            self._list(seq, known // self.block_size - 1, self.computed)

    def find_prefix(self, seq: Sequence) -> PrefixMatch:
        """
        What the cache has of the sequence's beginning, as far as it need not be computed: whole blocks up to
        the first miss, and from another block what follows.
        """
        found, parent = PrefixMatch([]), -1
        if not self.enable_prefix_caching:
            return found
        while True:
            start = len(found.blocks) * self.block_size
            packed = seq.packed(start, min(start + self.block_size, seq.num_cacheable_tokens))
            block_id, num_common = self._find_closed(seq, packed, len(found.blocks)), self.block_size
            if block_id == -1:
                block_id, num_common = self.computed.longest(parent, packed)
            if num_common < self.block_size:
                break
            found.blocks.append(block_id)
            parent = self.blocks[block_id].hash
        is_free = num_common and self.blocks[block_id].ref_count == 0
        if is_free and len(self.free_block_ids) <= self.num_new_blocks(seq, found.blocks):
            block_id, num_common = -1, 0  # no room for it beside the new blocks
        num_computing = self.computing.longest(parent, packed, num_common)[1]
        return PrefixMatch(found.blocks, block_id, num_common, num_computing)

    def _find_closed(self, seq: Sequence, packed: bytes, i: int) -> int:
        """The block that the hash of the sequence's i-th block leads to, if it has these tokens; else -1."""
        if len(packed) == self.block_size * TOKEN_BYTES:
            block_id = self.hash_to_block_id.get(self._block_hash(seq, i), -1)
            if block_id != -1 and self.blocks[block_id].packed == packed:
                return block_id
        return -1

    def _share(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
            self.used_block_ids.add(block_id)
        block.ref_count += 1

    def _give_back(self, block_id: int) -> None:
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self.used_block_ids.remove(block_id)
            self.free_block_ids[block_id] = None

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0
        self._forget(block)
        block.reset()
        self.used_block_ids.add(block_id)
        return block_id

    def _list(self, seq: Sequence, i: int, index: PrefixIndex, end: int | None = None) -> None:
        """Have the sequence's i-th block found by its tokens up to this one. Closes it if that fills it."""
        if self.enable_prefix_caching:
            block = self.blocks[seq.block_table[i]]
            self._forget(block)
            start = i * self.block_size
            packed = seq.packed(start, min(start + self.block_size, len(seq)) if end is None else end)
            if len(packed) == self.block_size * TOKEN_BYTES:
                block.update(self._block_hash(seq, i), packed)
                self.hash_to_block_id[block.hash] = block.block_id
            else:
                block.update(-1, packed)
            index.add(block.block_id, self._block_hash(seq, i - 1) if i else -1, packed)

    def _forget(self, block: Block) -> None:
        """Make the block unfindable."""
        if not block.packed:
            return
        if self.hash_to_block_id.get(block.hash) == block.block_id:
            del self.hash_to_block_id[block.hash]
        for index in (self.computed, self.computing):
            index.remove(block.block_id)
        block.update(-1, b"")

    def _block_hash(self, seq: Sequence, i: int) -> int:
        """
        Hash of the sequence's i-th block, which is full. Hashes are kept: a waiting sequence is looked up
        each time blocks have become free.
        """
        while len(seq.block_hashes) <= i:
            prefix, next_one = seq.block_hashes[-1] if seq.block_hashes else -1, len(seq.block_hashes)
            start, end = next_one * self.block_size, (next_one + 1) * self.block_size
            token_ids = seq.packed(start, end) if end <= seq.num_prompt_tokens else seq.block(next_one)
            seq.block_hashes.append(self.compute_hash(token_ids, prefix))
        return seq.block_hashes[i]
