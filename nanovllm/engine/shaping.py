"""What the device remembers of requests that want more than a temperature: filters, biases, bans, penalties.

Each running sequence has a row here (`Sequence.row`), which is written when it is prefilled and kept up to
date by the device, so that the host need not know a token before the next one is drawn. A step in which
nobody wants anything of this never comes here. All tables are made with the engine, so that its memory is
known before the KV cache takes the rest; only a row's rules come and go with the sequence that is in it.
"""

from collections import Counter
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from nanovllm.kernels.filtering import filter_thresholds
from nanovllm.kernels.logit_edits import (
    BANNED,
    FIELDS,
    FOREVER,
    HISTORY,
    IN_PROMPT,
    apply_marks,
    apply_rules,
)
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

FILTERS, RULES, MARKS, LOGPROBS = 1, 2, 4, 8  # what a step needs, as a sum
# top_k, top_p, min_p; presence, frequency and repetition penalty, whether there are marks
NEUTRAL = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0)

RULE_WORDS = 1 << 22  # int32 that the rules of all running requests may take
MARKS_AT_ONCE = 1 << 18  # on their way to the device

# Added to a logit. Not -inf: what allowed_token_ids leaves comes first even if all of it is banned.
BAN = -1e30


def extras_of(params: SamplingParams) -> int:
    """Which of FILTERS, RULES, MARKS and LOGPROBS a request needs."""
    extras = 0
    if params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
        extras |= FILTERS
    if _has_rules(params):
        extras |= RULES
    if _is_penalised(params) or params.allowed_token_ids is not None:
        extras |= MARKS
    return extras | (LOGPROBS if params.logprobs is not None else 0)


def num_rule_words(params: SamplingParams, bad_words: list[list[int]], end_token_ids: Collection[int]) -> int:
    """How many int32 the rules of a request take on the device at the most; 0 if it has none."""
    if not _has_rules(params):
        return 0
    num_rules = len(params.logit_bias) + len(bad_words) + (len(end_token_ids) if params.min_tokens else 0)
    return 1 + FIELDS * num_rules + sum(len(word) - 1 for word in bad_words)


class ShapingUpdate(NamedTuple):
    """What the host knows of rows that are about to be prefilled. Indices count in the flattened tables."""

    rows: np.ndarray  # int64 [rows]
    settings: np.ndarray  # float32 [rows, 7], see NEUTRAL
    unruled_rows: list[int]  # whose rules are wanted no more
    rules: dict[int, np.ndarray]  # by row, see apply_rules
    history: np.ndarray  # int64 [tokens, 2], indices and what was drawn there
    marked_rows: np.ndarray  # int64 [rows with marks]
    marked_fill: np.ndarray  # int32 [rows with marks], the mark of tokens that are not listed
    marks: np.ndarray  # int64 [tokens, 2], indices and marks


class Shaping:
    # What comes and goes beside the tables: rules, those on their way to the device, and marks on theirs.
    reserved_bytes = 2 * 4 * RULE_WORDS + 32 * MARKS_AT_ONCE

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        num_rows = max_num_seqs + 1  # one for padding
        self.settings = torch.empty(num_rows, len(NEUTRAL), dtype=torch.float32, device=device)
        self.marks = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self.history = torch.full((num_rows, HISTORY), -1, dtype=torch.int32, device=device)
        self.rule_addresses = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # Each row's rules are a tensor of their own. Steps under way may still read one that is dropped here:
        # its memory goes to what the same stream does after them.
        self.rules: dict[int, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self.settings.copy_(torch.tensor(NEUTRAL))
        self.rule_addresses.zero_()
        self.rules.clear()
        self.set_rows: set[int] = set()  # that are not neutral on the device
        self.ruled: WeakValueDictionary[int, Sequence] = WeakValueDictionary()  # whose rules the rows have

    def update(self, sequences: list["Sequence"]) -> ShapingUpdate | None:
        """What the device must be told before it prefills these sequences; None if that is nothing."""
        involved = [seq for seq in sequences if seq.extras or seq.row in self.set_rows]
        if not involved:
            return None
        rows = [seq.row for seq in involved]
        self.set_rows.difference_update(rows)
        self.set_rows.update(seq.row for seq in involved if seq.extras)
        left = [row for row in self.rules if row not in self.ruled or self.ruled[row].row != row]
        ruled = [seq for seq in involved if seq.extras & RULES]
        self.ruled.update({seq.row: seq for seq in ruled})
        marked = [seq for seq in involved if seq.extras & MARKS]
        marks = list(map(_marks_of, marked))
        vocab_size = self.marks.shape[1]
        return ShapingUpdate(
            np.array(rows),
            np.array([_settings_of(seq) for seq in involved], dtype=np.float32),
            left,
            {seq.row: _rules_of(seq) for seq in ruled},
            _pairs({seq.row * HISTORY + i % HISTORY: t for seq in ruled for i, t in _drawn(seq)}),
            np.array([seq.row for seq in marked], dtype=np.int64),
            np.array([fill for fill, _ in marks], dtype=np.int32),
            _pairs(
                {
                    seq.row * vocab_size + token_id: mark
                    for seq, (_, listed) in zip(marked, marks, strict=True)
                    for token_id, mark in listed.items()
                }
            ),
        )

    def write(self, update: ShapingUpdate, to_device: Callable[[np.ndarray], torch.Tensor]) -> None:
        """Do what `update` says. `to_device` makes a tensor there of an array."""
        rows = to_device(update.rows)
        self.settings[rows] = to_device(update.settings)
        for row in [*update.unruled_rows, *update.rules]:
            self.rules.pop(row, None)
        if update.rules:
            rules = to_device(np.concatenate(list(update.rules.values())))
            parts = torch.split_with_sizes_copy(rules, list(map(len, update.rules.values())))
            self.rules.update(zip(update.rules, parts, strict=True))
            self.history[to_device(np.array(list(update.rules)))] = -1
            index, token_ids = to_device(update.history).unbind(1)
            self.history.view(-1)[index] = token_ids.int()
        addresses = [self.rules[row].data_ptr() if row in self.rules else 0 for row in update.rows.tolist()]
        self.rule_addresses[rows] = to_device(np.array(addresses))
        if len(update.marked_rows):
            self.marks[to_device(update.marked_rows)] = to_device(update.marked_fill)[:, None]
            for start in range(0, len(update.marks), MARKS_AT_ONCE):
                index, marks = to_device(update.marks[start : start + MARKS_AT_ONCE]).unbind(1)
                self.marks.view(-1)[index] = marks.int()

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        temperatures: torch.Tensor,
        extras: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        The logits to draw from, [batch, vocabulary], and the lowest that may be drawn, float32 [batch], if
        there is such. logits [batch, vocabulary], which stay as they are; rows int32, positions int64 (of the
        tokens to be drawn) and temperatures float32 [batch].
        """
        settings = self.settings[rows]
        if extras & (RULES | MARKS):
            logits = logits.to(torch.float32, copy=True)
        if extras & RULES:
            apply_rules(logits, rows, positions, self.rules, self.rule_addresses, self.history)
        if extras & MARKS:
            apply_marks(logits, rows, settings[:, 3:7], self.marks)
        thresholds = filter_thresholds(logits, temperatures, settings) if extras & FILTERS else None
        return logits, thresholds

    def remember(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, extras: int
    ) -> None:
        """Note the tokens drawn for these rows, int64 [batch]."""
        if extras & RULES:
            self.history.index_put_((rows, positions % HISTORY), token_ids.int())
        if extras & MARKS:
            index = rows.long() * self.marks.shape[1] + token_ids
            self.marks.view(-1)[index] += 1


def _has_rules(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.bad_words or params.min_tokens)


def _is_penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def _settings_of(seq: "Sequence") -> tuple[float, ...]:
    if not seq.extras:
        return NEUTRAL
    params = seq.sampling_params
    repetition = min(max(params.repetition_penalty, 1e-6), 1e6)  # what float32 can work with
    top_p = max(params.top_p, 1e-30)
    penalties = (params.presence_penalty, params.frequency_penalty, repetition, bool(seq.extras & MARKS))
    return (max(params.top_k, 0), top_p, params.min_p, *penalties)


def _rules_of(seq: "Sequence") -> np.ndarray:
    """int32, see apply_rules."""
    params = seq.sampling_params
    biases = Counter()  # one rule for a token: the device adds in no order, and sums of floats depend on it
    for token_id, bias in params.logit_bias:
        biases[token_id] += bias
    ends = sorted(seq.end_token_ids) if params.min_tokens else []
    words = [[token_id] for token_id in biases] + seq.bad_words + [[token_id] for token_id in ends]
    lengths = [len(word) - 1 for word in words]
    number, num_biases, num_ends = len(words), len(biases), len(ends)
    until = min(seq.num_prompt_tokens + params.min_tokens, FOREVER)
    rules = [number] + [FOREVER] * (number - num_ends) + [until] * num_ends
    rules += np.array([*biases.values()] + [BAN] * (number - num_biases), np.float32).view(np.int32).tolist()
    rules += [word[-1] for word in words]
    rules += list(accumulate(lengths, initial=1 + FIELDS * number))[1:]
    rules += lengths
    rules += [token_id for word in words for token_id in word[:-1]]
    return np.array(rules, dtype=np.int32)


def _drawn(seq: "Sequence") -> list[tuple[int, int]]:
    """(position, token id) of the newest of the completion so far."""
    start = max(seq.num_prompt_tokens, len(seq.token_ids) - HISTORY)
    return list(enumerate(seq.token_ids[start:], start))


def _marks_of(seq: "Sequence") -> tuple[int, dict[int, int]]:
    """The mark of most tokens, and those of the others."""
    params = seq.sampling_params
    fill = 0 if params.allowed_token_ids is None else BANNED
    marks = dict.fromkeys(params.allowed_token_ids or (), 0)
    if _is_penalised(params):
        for token_id, count in Counter(seq.completion_token_ids).items():
            marks[token_id] = marks.get(token_id, fill) + count
        for token_id in set(seq.prompt_token_ids):
            marks[token_id] = marks.get(token_id, fill) | IN_PROMPT
    return fill, marks


def _pairs(values: dict[int, int]) -> np.ndarray:
    return np.array(list(values.items()), dtype=np.int64).reshape(-1, 2)
