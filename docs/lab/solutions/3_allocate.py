"""Free blocks that are shared cost a free block like new ones; used ones cost nothing."""

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import Hit
from nanovllm.engine.sequence import Sequence


class BlockManager(block_manager.BlockManager):
    def can_allocate(self, seq: Sequence, hit: Hit) -> bool:
        num_free_of_hit = sum(self.blocks[block_id].ref_count == 0 for block_id in hit.blocks)
        num_new = seq.num_blocks - len(hit.blocks)
        return num_new + num_free_of_hit + len(hit.pins) <= len(self.free_block_ids)

    def allocate(self, seq: Sequence, hit: Hit) -> None:
        seq.num_cached_tokens = seq.num_computed_tokens = hit.num_tokens
        for block_id in hit.blocks:
            self._take(block_id)
            seq.block_table.append(block_id)
        for block_id in hit.pins:
            self._take(block_id)
        while len(seq.block_table) < seq.num_blocks:
            self._open_block(seq)
            newest = len(seq.block_table) - 1
            if len(seq.block(newest)) == self.block_size:
                self._close(seq, newest)
        self.prefix_cache.allocated(seq, hit)
