"""Which block should the cache forget when it needs one?

The engine hands out the block that was freed least recently (LRU: a block that is found again is in use, and
goes to the end of the row when it is freed). First in, first out forgets by age, however popular a block is.
The third is for you: a random block stands there as a baseline. `evict` of a PrefixCache chooses, among the
free blocks.
"""

import random

from harness import callers_of, run, skewed_reuse, table

from nanovllm.engine.block_manager import Hit, PrefixCache
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.lab.simulator import Simulator

OPTIONS = {"kvcache_block_size": 16, "num_kvcache_blocks": 300, "max_num_seqs": 8}


class Plain(PrefixCache):
    """The core's: whole blocks, least recently freed first."""


class FirstInFirstOut(PrefixCache):
    def __init__(self) -> None:
        self.written_at: dict[int, int] = {}  # by block
        self.count = 0

    def allocated(self, seq: Sequence, hit: Hit) -> None:
        for block_id in seq.block_table[len(hit.blocks) :]:
            self.count += 1
            self.written_at[block_id] = self.count

    def evict(self) -> int:
        return min(self.pool.free_block_ids, key=lambda block_id: self.written_at.get(block_id, 0))


class Yours(PrefixCache):
    """`self.pool` is the BlockManager. Any free block will do; a wise choice is found again less often."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def evict(self) -> int:
        return self.rng.choice(list(self.pool.free_block_ids))


def main() -> None:
    reports = {}
    for cache in (Plain, FirstInFirstOut, Yours):
        with Simulator(**OPTIONS, extensions=[cache()]) as engine:
            reports[cache.__name__] = run(engine, skewed_reuse())
    print(table(reports))
    plain, fifo = reports["Plain"], reports["FirstInFirstOut"]
    assert fifo.token_ids == plain.token_ids
    assert plain.num_cached_tokens > fifo.num_cached_tokens
    print()
    with Simulator(**OPTIONS, extensions=[FirstInFirstOut()]) as engine, callers_of(FirstInFirstOut):
        run(engine, skewed_reuse(count=20))


if __name__ == "__main__":
    main()
