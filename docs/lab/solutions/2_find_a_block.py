"""The chain grows with the sequence, and each hash is computed once."""

import numpy as np
import xxhash

from nanovllm.engine import block_manager
from nanovllm.engine.sequence import Sequence


class BlockManager(block_manager.BlockManager):
    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int = -1) -> int:
        digest = xxhash.xxh64()
        if prefix != -1:
            digest.update(prefix.to_bytes(8, "little"))
        digest.update(np.array(token_ids, dtype="<i8").tobytes())
        return digest.intdigest()

    def find_block(self, seq: Sequence, i: int) -> int:
        hashes = seq.block_hashes
        for k in range(len(hashes), i + 1):
            hashes.append(self.compute_hash(seq.block(k), hashes[k - 1] if k else -1))
        block_id = self.hash_to_block_id.get(hashes[i], -1)
        if block_id == -1 or self.blocks[block_id].token_ids != seq.block(i):
            return -1
        return block_id
