"""Counting from the last token, not from behind it, keeps the full block from looking empty."""

from nanovllm.engine import sequence


class Sequence(sequence.Sequence):
    @property
    def num_blocks(self) -> int:
        full, rest = divmod(self.num_tokens, self.request.block_size)
        return full + (rest > 0)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.request.block_size

    def block(self, i: int) -> list[int]:
        size = self.request.block_size
        return self.token_ids[i * size : (i + 1) * size]
