"""When is a block opened, and when is it closed? The border puzzles every reader of this engine once.

Before a decode step writes the newest token, that token needs a place. `seq.num_tokens` counts it already. If
the tokens fill their blocks exactly but for the newest, it begins a block. If it fills its block, the block
is full when the step has run, and can be closed: hashed, never changed again, found by others. Its token must
be known for that: a step in flight may have drawn it without the host knowing yet (then `len(seq.token_ids) <
seq.num_tokens`, and it is closed later).

`seq.block_table` has the sequence's blocks. `self.close_newest(seq)` closes the block that the newest known
token fills; to open one, call `self._open_block(seq)`.
"""

from nanovllm.engine import block_manager
from nanovllm.engine.sequence import Sequence


class BlockManager(block_manager.BlockManager):
    def can_append(self, seq: Sequence) -> bool:
        """Whether the newest token has a place, or can get one."""
        raise NotImplementedError("exercise 4")

    def may_append(self, seq: Sequence) -> None:
        """Open a block if the newest token begins one; close the block that it fills."""
        raise NotImplementedError("exercise 4")
