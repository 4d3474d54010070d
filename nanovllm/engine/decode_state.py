"""What the device remembers of the running sequences from one decode step to the next.

Each running sequence has a row: its last token, length, temperature, seed and block table. The device
advances tokens and lengths itself; the host sends what only it knows (who takes part, newly opened blocks)
and only when that changes. All of it lives in one int32 buffer, so that any change is a list of (index,
value) pairs.
"""

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.decode_inputs import DecodeInputs, decode_inputs


class DecodeState:
    """
    Rows 0 .. max_num_seqs - 1 belong to sequences (`Sequence.row`); the last row stays empty, for padding.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device):
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.padding_row = max_num_seqs
        num_rows = -(-(max_num_seqs + 1) // 4) * 4  # so that every part begins at a multiple of 16 bytes
        sizes = {"seeds": 2 * num_rows, "tokens": num_rows, "lengths": num_rows, "temperatures": num_rows}
        sizes |= {"batch": num_rows, "tables": num_rows * max_blocks}
        self.offsets = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        views = {name: self.buffer[start : start + sizes[name]] for name, start in self.offsets.items()}
        self.tokens, self.lengths, self.batch = views["tokens"], views["lengths"], views["batch"]
        self.seeds, self.temperatures = (
            views["seeds"].view(torch.int64),
            views["temperatures"].view(torch.float32),
        )
        self.tables = views["tables"].view(num_rows, max_blocks)
        self.reset()

    def reset(self) -> None:
        """Forget what was sent."""
        self.sent_batch: list[int] = []

    def changes(self, sequences: list[Sequence], batch_size: int) -> np.ndarray:
        """
        What the device must be told before it decodes these sequences, padded to `batch_size` rows: int32
        [2, n], indices into the buffer and their values.
        """
        offsets, indices, values = self.offsets, [], []
        batch = [seq.row for seq in sequences] + [self.padding_row] * (batch_size - len(sequences))
        if self.sent_batch[:batch_size] != batch:
            self.sent_batch[:batch_size] = batch
            indices.extend(range(offsets["batch"], offsets["batch"] + batch_size))
            values.extend(batch)
        for seq in sequences:
            num_blocks, num_sent = len(seq.block_table), seq.num_sent_blocks
            if num_sent == num_blocks:
                continue
            if num_sent == 0:  # new in its row
                seed, row = offsets["seeds"] + 2 * seq.row, seq.row
                indices += [seed, seed + 1, offsets["lengths"] + row, offsets["temperatures"] + row]
                values += [seq.seed & 0xFFFFFFFF, seq.seed >> 32, len(seq)]
                values.append(int(np.float32(seq.temperature).view(np.int32)))
            start = offsets["tables"] + seq.row * self.max_blocks
            indices.extend(range(start + num_sent, start + num_blocks))
            values.extend(seq.block_table[num_sent:])
            seq.num_sent_blocks = num_blocks
        return np.array([indices, values], dtype=np.int64).astype(np.int32)

    def apply(self, changes: torch.Tensor) -> None:
        """Write (index, value) pairs, int32 [2, n] on the device."""
        self.buffer.index_put_((changes[0],), changes[1])

    def next_inputs(self, batch: torch.Tensor) -> DecodeInputs:
        """Inputs of the decode step for these rows, int32 [batch]; counts their next tokens as present."""
        return decode_inputs(
            batch, self.tokens, self.lengths, self.tables, self.temperatures, self.seeds, self.block_size
        )

    def feed(self, batch: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Make drawn tokens the inputs of these rows' next step."""
        self.tokens.index_put_((batch,), token_ids.int())
