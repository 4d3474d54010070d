"""What a device keeps of each running sequence, so that a decode step sends it only what it cannot know.

Each running sequence has a row (`Sequence.row`). It says how to go on (last token, length, block table), how
to draw (temperature, seed, filters, penalties) and how to change logits before that (rules, with a history of
drawn tokens for them, and flags of tokens). The device itself appends each token that it draws. The host
writes a row when its sequence is prefilled, and later sends newly opened blocks and who takes part.
All tables are made with the engine, so that their memory is known before the KV cache takes the rest; only
rules come and go with their sequences.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.edits import (
    drawn_last,
    filters_of,
    penalties_of,
    rules_of,
    temperature_of,
    token_flags_of,
)
from nanovllm.engine.scheduler import RULE_WORDS
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.decode_inputs import DecodeInputs, InputTables, decode_inputs
from nanovllm.kernels.filtering import Filters, filter_thresholds
from nanovllm.kernels.logit_edits import HISTORY, Penalties, apply_rules, apply_token_flags
from nanovllm.sampling_params import Needs

FLAGS_AT_ONCE = 1 << 18  # on their way to a device


class RowLayout:
    """
    Where the tables lie in one buffer of int32 words, so that any change of them is a list of (index, value)
    pairs. Rows 0 .. max_num_seqs - 1 belong to sequences; the next one stays empty, for padding.
    """

    def __init__(self, config: Any):
        self.block_size: int = config.kvcache_block_size
        self.vocab_size: int = config.hf_config.vocab_size
        self.padding_row: int = config.max_num_seqs
        self.max_blocks = -(-config.max_model_len // self.block_size)
        self.num_rows = -(-(self.padding_row + 1) // 4) * 4  # each table begins at a multiple of 16 bytes
        self.widths = {"seeds": 2, "tokens": 1, "lengths": 1, "temperatures": 1, "batch": 1}
        self.widths |= {"filters": len(Filters._fields), "penalties": len(Penalties._fields)}
        self.widths |= {"block_tables": self.max_blocks}
        ends = np.cumsum([width * self.num_rows for width in self.widths.values()]).tolist()
        self.starts = dict(zip(self.widths, [0, *ends], strict=False))
        self.num_words: int = ends[-1]


class LogitEdits(NamedTuple):
    """Rules and token flags of rows. Indices count in the flattened tables."""

    dropped_rows: list[int]  # whose rules are wanted no more
    rules: dict[int, np.ndarray]  # by row, see `apply_rules`
    history: np.ndarray  # int64 [tokens, 2], indices and what was drawn there
    flagged_rows: np.ndarray  # int64 [rows with token flags]
    flag_fills: np.ndarray  # int32 [rows with token flags], the flags of tokens that are not listed
    token_flags: np.ndarray  # int64 [tokens, 2], indices and flags


class RowUpdates(NamedTuple):
    """What a device must be told before a step."""

    words: np.ndarray  # int32 [2, n], indices into the buffer of `RowLayout` and their values
    edits: LogitEdits | None


class HostRows:
    """The host's half: knows what was sent. Every device applies all updates, in the order they are made."""

    def __init__(self, layout: RowLayout):
        self.layout = layout
        self.reset()

    def reset(self) -> None:
        """Forget what was sent; the devices' halves are reset, too."""
        self.batch: list[int] = []  # rows of the last decode step
        self.num_blocks = [0] * self.layout.padding_row  # that the row's block table has on a device
        self.ruled: dict[int, Sequence] = {}  # whose rules the rows have

    def prefill(self, sequences: list[Sequence]) -> RowUpdates:
        """Everything about these sequences as the step leaves them, at whose end they have a token more."""
        indices: list[int] = []
        values: list[int] = []
        num_filters = len(Filters._fields)
        numbers = [
            (temperature_of(seq.sampling_params), *filters_of(seq.sampling_params), *penalties_of(seq))
            for seq in sequences
        ]
        words = np.array(numbers, dtype=np.float32).view(np.int32).tolist()
        for seq, (temperature, *others) in zip(sequences, words, strict=True):
            row = {
                "seeds": [seq.seed & 0xFFFFFFFF, seq.seed >> 32],
                "lengths": [seq.num_computed_tokens + seq.num_scheduled_tokens + 1],
                "temperatures": [temperature],
                "filters": others[:num_filters],
                "penalties": others[num_filters:],
            }
            for name, row_values in row.items():
                start = self.layout.starts[name] + seq.row * len(row_values)
                indices.extend(range(start, start + len(row_values)))
                values.extend(row_values)
            self.num_blocks[seq.row] = 0
            self._add_blocks(seq, indices, values)
        return RowUpdates(_int32(indices, values), self._edits(sequences))

    def decode(self, sequences: list[Sequence]) -> RowUpdates | None:
        """What has changed since the last step; None if nothing has."""
        indices: list[int] = []
        values: list[int] = []
        rows, num_blocks = [seq.row for seq in sequences], self.num_blocks
        if rows != self.batch:
            values += rows + [self.layout.padding_row] * (len(self.batch) - len(rows))
            start = self.layout.starts["batch"]
            indices += range(start, start + len(values))
            self.batch = rows
        for seq in sequences:
            if len(seq.block_table) != num_blocks[seq.row]:
                self._add_blocks(seq, indices, values)
        return RowUpdates(_int32(indices, values), None) if indices else None

    def _add_blocks(self, seq: Sequence, indices: list[int], values: list[int]) -> None:
        """The part of the block table that has not been sent."""
        num_sent, num_blocks = self.num_blocks[seq.row], len(seq.block_table)
        start = self.layout.starts["block_tables"] + seq.row * self.layout.max_blocks
        indices.extend(range(start + num_sent, start + num_blocks))
        values.extend(seq.block_table[num_sent:])
        self.num_blocks[seq.row] = num_blocks

    def _edits(self, sequences: list[Sequence]) -> LogitEdits | None:
        dropped = [row for row, seq in self.ruled.items() if seq.row != row]
        for row in dropped:
            del self.ruled[row]
        ruled = [seq for seq in sequences if seq.needs & Needs.RULES]
        flagged = [seq for seq in sequences if seq.needs & Needs.TOKEN_FLAGS]
        if not (dropped or ruled or flagged):
            return None
        self.ruled.update({seq.row: seq for seq in ruled})
        flags, vocab_size = list(map(token_flags_of, flagged)), self.layout.vocab_size
        return LogitEdits(
            dropped,
            {seq.row: rules_of(seq) for seq in ruled},
            _pairs({seq.row * HISTORY + i % HISTORY: t for seq in ruled for i, t in drawn_last(seq)}),
            np.array([seq.row for seq in flagged], dtype=np.int64),
            np.array([fill for fill, _ in flags], dtype=np.int32),
            _pairs(
                {
                    seq.row * vocab_size + token_id: flag
                    for seq, (_, listed) in zip(flagged, flags, strict=True)
                    for token_id, flag in listed.items()
                }
            ),
        )


class DeviceRows:
    """The device's half: the tables, and what each step reads from them and writes to them."""

    # What comes and goes beside the tables: rules, those on their way to the device, and flags on theirs.
    reserved_bytes = 2 * 4 * RULE_WORDS + 32 * FLAGS_AT_ONCE

    def __init__(self, layout: RowLayout, device: torch.device):
        self.block_size, self.padding_row = layout.block_size, layout.padding_row
        self.device = device
        num_rows = layout.num_rows
        self.buffer = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        parts = self.buffer.split([width * num_rows for width in layout.widths.values()])
        tables = dict(zip(layout.widths, parts, strict=True))
        self.inputs = InputTables(
            tables["tokens"],
            tables["lengths"],
            tables["block_tables"].view(num_rows, -1),
            tables["temperatures"].view(torch.float32),
            tables["seeds"].view(torch.int64),
        )
        self.batch = tables["batch"]  # the rows of the decode step, and padding behind them
        self.filters = tables["filters"].view(torch.float32).view(num_rows, -1)
        self.penalties = tables["penalties"].view(torch.float32).view(num_rows, -1)
        self.token_flags = torch.zeros(num_rows, layout.vocab_size, dtype=torch.int32, device=device)
        self.history = torch.full((num_rows, HISTORY), -1, dtype=torch.int32, device=device)
        self.rule_addresses = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # Each row's rules are a tensor of their own. Steps under way may still read one that is dropped here:
        # its memory goes to what the same stream does after them.
        self.rules: dict[int, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self.buffer.zero_()
        self.batch.fill_(self.padding_row)
        self.rule_addresses.zero_()
        self.rules.clear()

    def apply(self, updates: RowUpdates) -> None:
        indices, values = to_device(updates.words, self.device)
        self.buffer.index_put_((indices,), values)
        if updates.edits is not None:
            self._apply_edits(updates.edits)

    def _apply_edits(self, edits: LogitEdits) -> None:
        rows = [*edits.dropped_rows, *edits.rules]
        for row in rows:
            self.rules.pop(row, None)
        if edits.rules:
            rules = to_device(np.concatenate(list(edits.rules.values())), self.device)
            parts = torch.split_with_sizes_copy(rules, list(map(len, edits.rules.values())))
            self.rules.update(zip(edits.rules, parts, strict=True))
            self.history[to_device(np.array(list(edits.rules)), self.device)] = -1
            index, token_ids = to_device(edits.history, self.device).unbind(1)
            self.history.view(-1)[index] = token_ids.int()
        if rows:
            addresses = [self.rules[row].data_ptr() if row in self.rules else 0 for row in rows]
            rows, addresses = to_device(np.array([rows, addresses]), self.device)
            self.rule_addresses[rows] = addresses
        if len(edits.flagged_rows):
            fills = to_device(edits.flag_fills, self.device)
            self.token_flags[to_device(edits.flagged_rows, self.device)] = fills[:, None]
            for start in range(0, len(edits.token_flags), FLAGS_AT_ONCE):
                some = edits.token_flags[start : start + FLAGS_AT_ONCE]
                index, flags = to_device(some, self.device).unbind(1)
                self.token_flags.view(-1)[index] = flags.int()

    def next_inputs(self, rows: torch.Tensor) -> DecodeInputs:
        """Inputs of the decode step for these rows, int32 [batch]; counts their next tokens as present."""
        return decode_inputs(rows, self.inputs, self.block_size)

    def edit_logits(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        temperatures: torch.Tensor,
        needs: Needs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        The logits to draw from, [batch, vocabulary], and the lowest that may be drawn, float32 [batch], if
        there is such. logits [batch, vocabulary], which stay as they are; rows int32, positions int64 (of the
        tokens to be drawn) and temperatures float32 [batch].
        """
        if needs & (Needs.RULES | Needs.TOKEN_FLAGS):
            logits = logits.to(torch.float32, copy=True)
        if needs & Needs.RULES:
            apply_rules(logits, rows, positions, self.rules, self.rule_addresses, self.history)
        if needs & Needs.TOKEN_FLAGS:
            apply_token_flags(logits, rows, self.penalties[rows], self.token_flags)
        if needs & Needs.FILTERS:
            return logits, filter_thresholds(logits, temperatures, self.filters[rows])
        return logits, None

    def note_drawn(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, needs: Needs
    ) -> None:
        """Make the tokens drawn for these rows, int64 [batch], the inputs of their next step."""
        self.inputs.tokens.index_put_((rows,), token_ids.int())
        if needs & Needs.RULES:
            self.history.index_put_((rows, positions % HISTORY), token_ids.int())
        if needs & Needs.TOKEN_FLAGS:
            index = rows.long() * self.token_flags.shape[1] + token_ids
            self.token_flags.view(-1)[index] += 1


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy of it that steps enqueued from now on find; waits for nothing."""
    tensor = torch.from_numpy(array).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _int32(indices: list[int], values: list[int]) -> np.ndarray:
    return np.array([indices, values], dtype=np.int64).astype(np.int32)


def _pairs(values: dict[int, int]) -> np.ndarray:
    return np.array(list(values.items()), dtype=np.int64).reshape(-1, 2)
