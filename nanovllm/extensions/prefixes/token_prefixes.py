"""Prompts share cached tokens to the token: where two part ways inside a block, what is equal is copied.

`TokenPrefixes` finds whole blocks as the core does, and behind them, with an index, the block that begins
with most of the tokens that follow. Its other half, on every rank, copies these. `HoldBack` lets a prompt
wait for one step that computes what it could copy then.

The index: blocks that follow the same tokens are kept sorted by their own, so the one that has most in common
with some tokens is a neighbour of the place where these would stand. Finding it takes a binary search,
however many blocks there are. Tokens are sorted as bytes, which are compared in C: in any order of bytes
equal beginnings are neighbours.
"""

import struct
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from nanovllm.engine.block_manager import Hit, PrefixCache
from nanovllm.engine.scheduler import Admission, Verdict
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import to_device
from nanovllm.extensions.prefixes.kernels.copy_pages import copy_blocks

WAIT_TOKENS = 64
# What stands for all tokens before a block: the hash of the block before it. And whether a step that computes
# the block has been enqueued: only then it can be copied.
Place = tuple[int, bool]
COMPUTING, COMPUTED = False, True


def pack(token_ids: list[int]) -> bytes:
    """The ids as little-endian int64."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def count_common(first: bytes, second: bytes) -> int:
    """How many tokens two lists of packed tokens begin with in common."""
    length = min(len(first), len(second)) // 8
    a, b = (np.frombuffer(packed, "<i8", length) for packed in (first, second))
    differ = a != b
    return int(differ.argmax()) if differ.any() else length


@dataclass
class TokenHit(Hit):
    """What of `num_tokens` lies behind the whole blocks is copied from block `source`."""

    source: int = -1
    num_soon: int = 0  # what num_tokens would be after the step that is being scheduled


class TokenPrefixes(PrefixCache):
    num_copied_tokens = 0

    def start(self, pool: Any) -> None:
        super().start(pool)
        self.blocks: dict[int, tuple[Place, bytes]] = {}  # in the index, by id: where, and packed tokens
        self.children: dict[Place, list[tuple[bytes, int]]] = {}  # (packed tokens, block id), sorted
        self.copies: list[tuple[int, int, int]] = []  # of the step: source, target, number of tokens
        self.pinned: set[int] = set()  # sources that were free

    def find(self, seq: Sequence) -> TokenHit:
        """Whole blocks up to the first miss, and from another block what follows."""
        pool = self.pool
        most, size = self.max_cached(seq), pool.block_size
        blocks: list[int] = []
        parent = -1
        while True:
            start = len(blocks) * size
            end = start + size
            num_common = size
            block_id = pool.find_block(seq, len(blocks)) if end <= most else -1
            if block_id == -1:
                tokens = pack(seq.token_ids[start : min(end, most)])
                block_id, num_common = self.longest((parent, COMPUTED), tokens)
            if num_common < size:
                break
            blocks.append(block_id)
            parent = pool.blocks[block_id].hash
        _, num_computing = self.longest((parent, COMPUTING), tokens)
        pins = (block_id,) if num_common and pool.blocks[block_id].ref_count == 0 else ()
        hit = TokenHit(blocks, start + num_common, pins, block_id, start + num_computing)
        if pins and not pool.can_allocate(seq, hit):  # no room for the source beside the new blocks
            hit.num_tokens, hit.pins = start, ()
        return hit

    def longest(self, place: Place, tokens: bytes) -> tuple[int, int]:
        """The block that begins with most of these tokens, and with how many; (-1, 0) if there is none."""
        best = -1, 0
        children = self.children.get(place, [])
        i = bisect_left(children, (tokens,))
        for others, block_id in children[max(i - 1, 0) : i + 1]:
            length = count_common(others, tokens)
            if length > best[1]:
                best = block_id, length
        return best

    def add(self, seq: Sequence, i: int, is_computed: bool, end: int) -> None:
        """Have the sequence's i-th block found by its tokens, as far as they are before this one."""
        block_id = seq.block_table[i]
        start = i * self.pool.block_size
        packed = pack(seq.token_ids[start:end])
        place = seq.block_hashes[i - 1] if i else -1, is_computed
        self.forgotten(block_id)
        self.blocks[block_id] = place, packed
        insort(self.children.setdefault(place, []), (packed, block_id))

    def forgotten(self, block_id: int) -> None:
        if block_id in self.blocks:
            place, packed = self.blocks.pop(block_id)
            children = self.children[place]
            del children[bisect_left(children, (packed, block_id))]
            if not children:
                del self.children[place]

    def allocated(self, seq: Sequence, hit: TokenHit) -> None:
        self.pinned.update(hit.pins)
        size = self.pool.block_size
        first = len(hit.blocks)
        for i in range(first, seq.num_blocks):
            self.add(seq, i, COMPUTING, (i + 1) * size)
        num_copied = hit.num_tokens % size
        if num_copied:
            self.copies.append((hit.source, seq.block_table[first], num_copied))
            self.num_copied_tokens += num_copied

    def written(self, seq: Sequence, start: int, end: int) -> None:
        """A block that is filled in part counts if the prompt ends there."""
        size = self.pool.block_size
        for i in range(start // size, -(-end // size)):
            last = min((i + 1) * size, end)
            if last % size == 0 or last == seq.num_tokens:
                self.add(seq, i, COMPUTED, last)

    def leaving(self, seq: Sequence) -> None:
        """Its last block, which is filled in part, can be copied from, too."""
        end = min(len(seq.token_ids), seq.num_computed_tokens)
        i, rest = divmod(end, self.pool.block_size)
        if rest and self.pool.blocks[seq.block_table[i]].hash == -1:
            self.add(seq, i, COMPUTED, end)

    def prepare(self, sequences: list[Sequence]) -> np.ndarray | None:
        """int64 [copies, 3]: from which block to which, and how many tokens."""
        for block_id in self.pinned:  # no block is handed out before the step that copies is enqueued
            self.pool.give_back(block_id)
        self.pinned.clear()
        for seq in sequences:
            start = seq.num_computed_tokens
            self.written(seq, start, start + seq.num_scheduled_tokens)
        copies, self.copies = self.copies, []
        return np.array(copies) if copies else None

    def receive(self, message: np.ndarray, kv_cache: Any) -> None:
        copy_blocks(kv_cache, to_device(message, kv_cache.device))

    def stats(self) -> dict[str, int]:
        return {"num_copied_tokens": self.num_copied_tokens}


class HoldBack(Admission):
    """
    Prompts share whole blocks that the same step computes, but can only copy what an earlier one has. So a
    prompt that could copy much more after the step that is being scheduled waits for it, once.
    """

    def __init__(self) -> None:
        self.have_waited: WeakSet[Sequence] = WeakSet()

    def admits(self, seq: Sequence, hit: Hit, state: Any) -> Verdict:
        num_gained = getattr(hit, "num_soon", 0) - hit.num_tokens
        if num_gained < WAIT_TOKENS or seq in self.have_waited:
            return Verdict.ADMIT
        self.have_waited.add(seq)
        return Verdict.WAIT
