"""The inputs of a decode step, gathered on the device from what it keeps of the running sequences.

Each running sequence has a slot, which is its index in these tables. The host sends only what changes in the
tables, and for most steps nothing. engine/slots.py says how they lie in memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import tl, triton, use_triton


class DecodeInputs(NamedTuple):
    input_ids: Tensor  # int64 [batch]
    positions: Tensor  # int64 [batch], of the input tokens
    slot_mapping: Tensor  # int32 [batch], -1 for a padded row
    context_lens: Tensor  # int32 [batch], 0 for a padded row; the positions of the tokens to be drawn
    block_tables: Tensor  # int32 [batch, max blocks]
    temperatures: Tensor  # float32 [batch]
    seeds: Tensor  # int64 [batch]


class InputTables(NamedTuple):
    """
    What the device keeps of each running sequence: columns of a table with a row for each slot. A slot of
    length 0 is padding.
    """

    tokens: Tensor  # int32 [slots], the next input
    lengths: Tensor  # int32 [slots], at the end of the next step
    block_tables: Tensor  # int32 [slots, max blocks]
    temperatures: Tensor  # float32 [slots]
    seeds: Tensor  # int64 [slots]


def decode_inputs(slots: Tensor, tables: InputTables, block_size: int) -> DecodeInputs:
    """
    The inputs of the sequences with these slots, int32 [batch]; of a prefill step, what it needs of them.
    Adds 1 to their lengths in the table, for the step that follows.
    """
    if not use_triton(slots):
        return decode_inputs_torch(slots, tables, block_size)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(len(slots), *shape, dtype=dtype, device=slots.device)

    width, stride = tables.block_tables.shape[1], tables.block_tables.stride(0)
    out = DecodeInputs(
        input_ids=empty(torch.int64),
        positions=empty(torch.int64),
        slot_mapping=empty(torch.int32),
        context_lens=empty(torch.int32),
        block_tables=empty(torch.int32, width),
        temperatures=empty(torch.float32),
        seeds=empty(torch.int64),
    )
    _decode_inputs_kernel[slots.shape](slots, *tables, *out, stride, width, block_size, num_warps=1)
    return out


def decode_inputs_torch(slots: Tensor, tables: InputTables, block_size: int) -> DecodeInputs:
    tokens, lengths, block_tables, temperatures, seeds = (table.index_select(0, slots) for table in tables)
    is_real = lengths > 0
    new_tokens = is_real.int()
    positions = (lengths - new_tokens).long()
    blocks = block_tables.gather(1, positions[:, None] // block_size).squeeze(1)
    slot_mapping = torch.where(is_real, blocks * block_size + positions % block_size, -1).int()
    tables.lengths.index_add_(0, slots, new_tokens)
    return DecodeInputs(tokens.long(), positions, slot_mapping, lengths, block_tables, temperatures, seeds)


@triton.jit(do_not_specialize=["stride", "width"])
def _decode_inputs_kernel(
    slots,
    tokens, lengths, block_tables, temperatures, seeds,  # InputTables
    input_ids, positions, slot_mapping, context_lens,  # DecodeInputs, from here on
    batch_tables, batch_temperatures, batch_seeds,
    stride, width, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(slots + i).to(tl.int64) * stride
    length = tl.load(lengths + row)
    position = tl.maximum(length - 1, 0)
    table = block_tables + row
    block = tl.load(table + position // BLOCK_SIZE)
    tl.store(input_ids + i, tl.load(tokens + row))
    tl.store(positions + i, position)
    tl.store(slot_mapping + i, tl.where(length > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    tl.store(context_lens + i, length)
    tl.store(batch_temperatures + i, tl.load(temperatures + row))
    tl.store(batch_seeds + i, tl.load(seeds + row // 2))
    used = position // BLOCK_SIZE + 1
    for start in range(0, used, 32):
        columns = start + tl.arange(0, 32)
        inside = columns < used
        blocks = tl.load(table + columns, mask=inside)
        tl.store(batch_tables + i.to(tl.int64) * width + columns, blocks, mask=inside)
    if length > 0:  # all padded rows share one slot, whose length stays 0
        tl.store(lengths + row, length + 1)
