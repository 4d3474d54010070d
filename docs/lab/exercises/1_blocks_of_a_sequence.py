"""Which tokens of a sequence lie in which block of the KV cache?

A block has `self.request.block_size` tokens. Write three members of Sequence, from `self.num_tokens` and
`self.token_ids`. Mind the sequence that ends exactly with a block: its last block is full, not empty.
"""

from nanovllm.engine import sequence


class Sequence(sequence.Sequence):
    @property
    def num_blocks(self) -> int:
        """How many blocks its tokens take."""
        raise NotImplementedError("exercise 1")

    @property
    def last_block_num_tokens(self) -> int:
        """How many tokens its last block has, from 1 to the block size."""
        raise NotImplementedError("exercise 1")

    def block(self, i: int) -> list[int]:
        """Token ids of the i-th block; the last one may be shorter than a block."""
        raise NotImplementedError("exercise 1")
