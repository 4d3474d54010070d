"""Does a sequence fit, and which blocks does it get?

`hit.blocks` are blocks of the cache that hold what the sequence begins with; it shares them. Shared blocks
that others use already cost no free block; those that lie free and those that are new do. Full blocks are
closed at once, before they are computed: who is admitted behind this sequence may share them, since every
layer writes keys before it reads any.

Use `self._take(block_id)` (one sequence more has the block), `self._open_block(seq)` (a new, free one at the
end of its table) and `self._close(seq, i)` (the i-th block of its table is found from now on).
`self.prefix_cache.allocated(seq, hit)`
comes last.
"""

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import Hit
from nanovllm.engine.sequence import Sequence


class BlockManager(block_manager.BlockManager):
    def can_allocate(self, seq: Sequence, hit: Hit) -> bool:
        """
        Whether there are free blocks enough for all blocks of the sequence (`seq.num_blocks`), and for
        `hit.pins`, free ones that are needed besides.
        """
        raise NotImplementedError("exercise 3")

    def allocate(self, seq: Sequence, hit: Hit) -> None:
        """
        Take `hit.blocks` and `hit.pins`, put the former into `seq.block_table`, and new ones behind them. The
        first `hit.num_tokens` tokens need not be computed: `seq.num_cached_tokens` and
        `seq.num_computed_tokens` say so.
        """
        raise NotImplementedError("exercise 3")
