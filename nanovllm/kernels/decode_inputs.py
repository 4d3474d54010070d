"""The inputs of a decode step, gathered on the device from its tables of the running sequences.

The host sends only changes of these tables (see engine/device_rows.py), and for most steps nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import tl, triton, use_triton


class DecodeInputs(NamedTuple):
    input_ids: Tensor  # int64 [batch]
    positions: Tensor  # int64 [batch], of the input tokens
    slot_mapping: Tensor  # int32 [batch], -1 for a padded row
    context_lens: Tensor  # int32 [batch], 0 for a padded row
    block_tables: Tensor  # int32 [batch, max blocks]
    temperatures: Tensor  # float32 [batch]
    seeds: Tensor  # int64 [batch]
    next_positions: Tensor  # int64 [batch], of the tokens to be drawn


class InputTables(NamedTuple):
    """What the device keeps of each sequence, one row each. A row of length 0 is padding."""

    tokens: Tensor  # int32 [rows], of the next input
    lengths: Tensor  # int32 [rows], which count the input token
    block_tables: Tensor  # int32 [rows, max blocks]
    temperatures: Tensor  # float32 [rows]
    seeds: Tensor  # int64 [rows]


def decode_inputs(rows: Tensor, tables: InputTables, block_size: int) -> DecodeInputs:
    """
    rows int32 [batch] are the rows of the batch's sequences. Adds 1 to their lengths in the table, for the
    next step.
    """
    if not use_triton(rows):
        return decode_inputs_torch(rows, tables, block_size)
    batch, width = len(rows), tables.block_tables.shape[1]
    out = DecodeInputs(
        *(torch.empty(batch, dtype=torch.int64, device=rows.device) for _ in range(2)),
        *(torch.empty(batch, dtype=torch.int32, device=rows.device) for _ in range(2)),
        torch.empty(batch, width, dtype=torch.int32, device=rows.device),
        torch.empty(batch, dtype=torch.float32, device=rows.device),
        *(torch.empty(batch, dtype=torch.int64, device=rows.device) for _ in range(2)),
    )
    _decode_inputs_kernel[(batch,)](rows, *tables, *out, width, BLOCK_SIZE=block_size, num_warps=1)
    return out


def decode_inputs_torch(rows: Tensor, tables: InputTables, block_size: int) -> DecodeInputs:
    tokens, length, block_tables, temperatures, seeds = (table.index_select(0, rows) for table in tables)
    is_real = length > 0
    new_tokens = is_real.int()
    positions = (length - new_tokens).long()
    blocks = block_tables.gather(1, positions[:, None] // block_size).squeeze(1)
    slots = torch.where(is_real, blocks * block_size + positions % block_size, -1).int()
    tables.lengths.index_add_(0, rows, new_tokens)
    sampling = temperatures, seeds, length.long()
    return DecodeInputs(tokens.long(), positions, slots, length, block_tables, *sampling)


@triton.jit(do_not_specialize=["width"])
def _decode_inputs_kernel(
    rows,
    tokens, lengths, block_tables, temperatures, seeds,  # InputTables
    input_ids, positions, slot_mapping, context_lens,  # DecodeInputs, from here on
    batch_tables, batch_temperatures, batch_seeds, next_positions,
    width, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    length = tl.load(lengths + row)
    position = tl.maximum(length - 1, 0)
    table = block_tables + row * width
    block = tl.load(table + position // BLOCK_SIZE)
    tl.store(input_ids + i, tl.load(tokens + row).to(tl.int64))
    tl.store(positions + i, position.to(tl.int64))
    tl.store(slot_mapping + i, tl.where(length > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    tl.store(context_lens + i, length)
    tl.store(batch_temperatures + i, tl.load(temperatures + row))
    tl.store(batch_seeds + i, tl.load(seeds + row))
    tl.store(next_positions + i, length.to(tl.int64))
    used = position // BLOCK_SIZE + 1
    for start in range(0, used, 32):
        columns = start + tl.arange(0, 32)
        blocks = tl.load(table + columns, mask=columns < used)
        tl.store(batch_tables + i.to(tl.int64) * width + columns, blocks, mask=columns < used)
    if length > 0:  # padded rows share one row, which stays as it is
        tl.store(lengths + row, length + 1)
