"""A table that is one block short means that the newest token begins a block."""

from nanovllm.engine import block_manager
from nanovllm.engine.sequence import Sequence


class BlockManager(block_manager.BlockManager):
    def can_append(self, seq: Sequence) -> bool:
        return len(seq.block_table) == seq.num_blocks or len(self.free_block_ids) > 0

    def may_append(self, seq: Sequence) -> None:
        if len(seq.block_table) < seq.num_blocks:
            self._open_block(seq)
            return
        is_full = seq.num_tokens % self.block_size == 0
        is_known = len(seq.token_ids) == seq.num_tokens
        if is_full and is_known:
            self.close_newest(seq)
