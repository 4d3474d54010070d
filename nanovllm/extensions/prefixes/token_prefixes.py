"""Prompts share cached tokens to the token: where two part ways inside a block, what is equal is copied.

`TokenPrefixes` finds whole blocks as the core does, and behind them, with an index, the block that begins
with most of the tokens that follow. The index has blocks that are COMPUTING, until the step that computes
them is complete, apart from those that are COMPUTED then; only these can be copied. Its other half, on every
rank, copies them. `HoldBack` lets a prompt wait for one step that computes what it could copy then.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from nanovllm.engine.policies import Admission, Hit, PrefixCache, Verdict
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import to_device
from nanovllm.extensions.prefixes.kernels.copy_pages import copy_blocks
from nanovllm.extensions.prefixes.prefix_index import TOKEN_BYTES, PrefixIndex, pack

WAIT_TOKENS = 64
COMPUTING, COMPUTED = False, True


@dataclass
class TokenHit(Hit):
    """`num_copied` tokens, the first ones of block `source`, follow the whole blocks."""

    source: int = -1
    num_copied: int = 0
    num_computing: int = 0  # how many could be copied after the step that is being scheduled


class TokenPrefixes(PrefixCache):
    def __init__(self) -> None:
        self.num_copied_tokens = 0

    def start(self, pool: Any) -> None:
        super().start(pool)
        self.index = PrefixIndex()
        # Before a sequence's first step, by seq_id: source, target, number of tokens.
        self.copies: dict[int, tuple[int, ...]] = {}
        self.pinned: set[int] = set()  # sources that were free

    def find(self, seq: Sequence) -> TokenHit:
        """Whole blocks up to the first miss, and from another block what follows."""
        pool = self.pool
        size = pool.block_size
        most = self.max_cached(seq)
        blocks: list[int] = []
        parent = -1
        while True:
            start = len(blocks) * size
            num_common = size
            block_id = pool.find_block(seq, len(blocks)) if start + size <= most else -1
            if block_id == -1:
                packed = pack(seq.token_ids[start : min(start + size, most)])
                block_id, num_common = self.index.longest((parent, COMPUTED), packed)
            if num_common < size:
                break
            blocks.append(block_id)
            parent = pool.blocks[block_id].hash
        _, num_computing = self.index.longest((parent, COMPUTING), packed)
        pins = (block_id,) if num_common and pool.blocks[block_id].ref_count == 0 else ()
        hit = TokenHit(blocks, start + num_common, pins, block_id, num_common, num_computing)
        if pins and not pool.can_allocate(seq, hit):  # no room for the source beside the new blocks
            hit = TokenHit(blocks, start, num_computing=num_computing)
        return hit

    def allocated(self, seq: Sequence, hit: TokenHit) -> None:
        self.pinned.update(hit.pins)
        for i in range(len(hit.blocks), seq.num_blocks):
            self._list(COMPUTING, seq, i, seq.num_tokens)
        if hit.num_copied:
            target = seq.block_table[len(hit.blocks)]
            self.copies[seq.seq_id] = hit.source, target, hit.num_copied
            self.num_copied_tokens += hit.num_copied

    def written(self, seq: Sequence, start: int, end: int) -> None:
        for block_id in self.pinned:  # the step that copies from them has been enqueued
            self.pool.give_back(block_id)
        self.pinned.clear()
        size = self.pool.block_size
        for i in range(start // size, -(-end // size)):
            # Not if a chunk of a prompt ends in the middle of the block.
            if (i + 1) * size <= end or end == seq.num_tokens:
                self._list(COMPUTED, seq, i, end)

    def leaving(self, seq: Sequence) -> None:
        """Its last block, which is filled in part, can be copied from, too."""
        end = min(len(seq.token_ids), seq.num_computed_tokens)
        i, rest = divmod(end, self.pool.block_size)
        if rest and self.pool.blocks[seq.block_table[i]].hash == -1:
            self._list(COMPUTED, seq, i, end)

    def forgotten(self, block_id: int) -> None:
        self.index.remove(block_id)

    def _list(self, state: bool, seq: Sequence, i: int, end: int) -> None:
        """Have the sequence's i-th block found by its tokens up to token `end`."""
        start = i * self.pool.block_size
        end = min(start + self.pool.block_size, end)
        packed = self.index.remove(seq.block_table[i])
        if len(packed) != (end - start) * TOKEN_BYTES:
            packed = pack(seq.token_ids[start:end])
        parent = seq.block_hashes[i - 1] if i else -1
        self.index.add(seq.block_table[i], (parent, state), packed)

    def prepare(self, sequences: list[Sequence]) -> np.ndarray | None:
        """int64 [3, copies]: from which block to which, and how many tokens."""
        if not self.copies:
            return None
        copies = [self.copies.pop(seq.seq_id) for seq in sequences if seq.seq_id in self.copies]
        return np.array(copies).T.copy() if copies else None

    def receive(self, message: np.ndarray, kv_cache: Any) -> None:
        copy_blocks(kv_cache, *to_device(message, kv_cache.device))

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
        gains = isinstance(hit, TokenHit) and hit.num_computing - hit.num_copied >= WAIT_TOKENS
        if not gains or seq in self.have_waited:
            return Verdict.ADMIT
        self.have_waited.add(seq)
        return Verdict.WAIT
