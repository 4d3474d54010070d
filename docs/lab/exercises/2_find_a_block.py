"""How does the engine know that it has computed these tokens before?

Keys and values of a token depend on every token before it. So a block is known by a hash of its own tokens
*and* of the hash of the block before: equal hashes, equal beginnings. Write both methods. A hash may collide,
so compare the tokens.
"""

from nanovllm.engine import block_manager
from nanovllm.engine.sequence import Sequence


class BlockManager(block_manager.BlockManager):
    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int = -1) -> int:
        """
        xxh64 (`xxhash.xxh64_intdigest`) of the previous block's hash, 8 bytes in little-endian order (left
        out where there is none, which is -1), followed by the token ids as int64 in little-endian order.
        """
        raise NotImplementedError("exercise 2")

    def find_block(self, seq: Sequence, i: int) -> int:
        """
        The block that holds what the i-th block of the sequence, a full one, is to hold; -1 if there is none.
        `self.hash_to_block_id` and `self.blocks` say what there is. Hashes of full blocks are kept in
        `seq.block_hashes`, where others look, too: a waiting sequence is looked up again and again.
        """
        raise NotImplementedError("exercise 2")
