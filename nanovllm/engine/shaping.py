"""What the device remembers of requests that want more than a temperature: filters, biases, bans, penalties.

Each running sequence has a row here (`Sequence.row`), which is written when it is prefilled and kept up to
date by the device, so that the host need not know a token before the next one is drawn. A step in which
nobody wants anything of this never comes here. Large tables are made when somebody first needs them.
"""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanovllm.kernels.filtering import filter_thresholds
from nanovllm.kernels.logit_edits import ANY, BANNED, FOREVER, IN_PROMPT, apply_marks, apply_rules
from nanovllm.kernels.runtime import next_power_of_2
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

FILTERS, RULES, MARKS, LOGPROBS = 1, 2, 4, 8  # what a step needs, as a sum
# top_k, top_p, min_p; presence, frequency and repetition penalty, whether there are marks; number of rules
NEUTRAL = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)

# Added to a logit. Not -inf: what allowed_token_ids leaves comes first even if all of it is banned.
BAN = -1e30


def extras_of(params: SamplingParams) -> int:
    """Which of FILTERS, RULES, MARKS and LOGPROBS a request needs."""
    extras = 0
    if params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
        extras |= FILTERS
    if params.logit_bias or params.bad_words or params.min_tokens:
        extras |= RULES
    if _is_penalised(params) or params.allowed_token_ids is not None:
        extras |= MARKS
    return extras | (LOGPROBS if params.logprobs is not None else 0)


class ShapingUpdate(NamedTuple):
    """What the host knows of rows that are about to be prefilled. Indices count in the flattened tables."""

    rows: np.ndarray  # int64 [rows]
    settings: np.ndarray  # float32 [rows, 8], see NEUTRAL
    rule_rows: np.ndarray  # int64 [rows with rules]
    rules: np.ndarray  # int32 [rows with rules, most rules, width], see apply_rules
    history: np.ndarray  # int64 [2, tokens], indices and what was drawn there
    marked_rows: np.ndarray  # int64 [rows with marks]
    marked_fill: np.ndarray  # int32 [rows with marks], the mark of tokens that are not listed
    marks: np.ndarray  # int64 [2, tokens], indices and marks


class Shaping:
    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int, device: torch.device):
        self.shape = (max_num_seqs + 1, max_model_len, vocab_size)  # one row for padding
        self.device = device
        self.settings = torch.empty(max_num_seqs + 1, len(NEUTRAL), dtype=torch.float32, device=device)
        self.rules = self.history = self.marks = None
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self.settings.copy_(torch.tensor(NEUTRAL))
        # As the host sends them: what found no memory is not wanted again.
        self.rules_shape = (8, 3) if self.rules is None else tuple(self.rules.shape[1:])
        self.set_rows: set[int] = set()  # that are not neutral on the device

    def update(self, sequences: list["Sequence"]) -> ShapingUpdate | None:
        """What the device must be told before it prefills these sequences; None if that is nothing."""
        involved = [seq for seq in sequences if seq.extras or seq.row in self.set_rows]
        if not involved:
            return None
        rows = [seq.row for seq in involved]
        self.set_rows.difference_update(rows)
        self.set_rows.update(seq.row for seq in involved if seq.extras)
        ruled = [seq for seq in involved if seq.extras & RULES]
        marked = [seq for seq in involved if seq.extras & MARKS]
        all_rules = list(map(_rules_of, ruled))
        num_rules = {seq.row: len(rules) for seq, rules in zip(ruled, all_rules, strict=True)}
        marks = list(map(_marks_of, marked))
        _, max_model_len, vocab_size = self.shape
        return ShapingUpdate(
            np.array(rows),
            np.array([_settings_of(seq, num_rules.get(seq.row, 0)) for seq in involved], dtype=np.float32),
            np.array([seq.row for seq in ruled], dtype=np.int64),
            self._pack(all_rules),
            _pairs({seq.row * max_model_len + i: t for seq in ruled for i, t in _drawn(seq)}),
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

    def _pack(self, all_rules: list[list[tuple[int, float, tuple[int, ...]]]]) -> np.ndarray:
        """int32 [sequences, most rules, width], no smaller than any sent before."""
        most = max(map(len, all_rules), default=1)
        longest = max((len(tokens) for rules in all_rules for *_, tokens in rules), default=1)
        self.rules_shape = (
            max(self.rules_shape[0], next_power_of_2(most)),
            max(self.rules_shape[1], 2 + next_power_of_2(longest)),
        )
        packed = np.full((len(all_rules), *self.rules_shape), ANY, dtype=np.int32)
        for rows, rules in zip(packed, all_rules, strict=True):
            for row, (until, added, tokens) in zip(rows, rules, strict=False):
                row[:2] = until, np.float32(added).view(np.int32)
                row[-len(tokens) :] = tokens
        return packed

    def write(self, update: ShapingUpdate) -> bool:
        """
        Do what `update` says, whose arrays are tensors on the device by now. Returns whether a table that a
        CUDA graph may know has been replaced.
        """
        self.settings[update.rows] = update.settings
        replaced = False
        if len(update.rule_rows):
            replaced = self._make_rules(*update.rules.shape[1:])
            self.rules[update.rule_rows] = update.rules
            self.history[update.rule_rows] = -1
            self.history.view(-1)[update.history[0]] = update.history[1].int()
        if len(update.marked_rows):
            if self.marks is None:
                num_rows, _, vocab_size = self.shape
                self.marks = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=self.device)
            self.marks[update.marked_rows] = update.marked_fill[:, None]
            self.marks.view(-1)[update.marks[0]] = update.marks[1].int()
        return replaced

    def _make_rules(self, most: int, width: int) -> bool:
        """Make room for so many rules of that width; what was there stays."""
        num_rows, max_model_len, _ = self.shape
        old, new_shape = self.rules, (num_rows, most, width)
        if old is not None and old.shape == new_shape:
            return False
        self.rules = torch.full(new_shape, ANY, dtype=torch.int32, device=self.device)
        if old is None:
            self.history = torch.full((num_rows, max_model_len), -1, dtype=torch.int32, device=self.device)
            return False
        self.rules[:, : old.shape[1], :2] = old[..., :2]
        self.rules[:, : old.shape[1], 2 - old.shape[2] :] = old[..., 2:]
        return True

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
            apply_rules(logits, rows, positions, settings[:, 7], self.rules, self.history)
        if extras & MARKS:
            apply_marks(logits, rows, settings[:, 3:7], self.marks)
        thresholds = filter_thresholds(logits, temperatures, settings) if extras & FILTERS else None
        return logits, thresholds

    def remember(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, extras: int
    ) -> None:
        """Note the tokens drawn for these rows, int64 [batch]."""
        if extras & RULES:
            self.history.index_put_((rows, positions), token_ids.int())
        if extras & MARKS:
            index = rows.long() * self.marks.shape[1] + token_ids
            self.marks.view(-1)[index] += 1


def _is_penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def _settings_of(seq: "Sequence", num_rules: int) -> tuple[float, ...]:
    if not seq.extras:
        return NEUTRAL
    params = seq.sampling_params
    repetition = min(max(params.repetition_penalty, 1e-6), 1e6)  # what float32 can work with
    top_p = max(params.top_p, 1e-30)
    penalties = (params.presence_penalty, params.frequency_penalty, repetition, bool(seq.extras & MARKS))
    return (max(params.top_k, 0), top_p, params.min_p, *penalties, num_rules)


def _rules_of(seq: "Sequence") -> list[tuple[int, float, tuple[int, ...]]]:
    """(position from which it holds no longer, what it adds to the logit, tokens) each, see apply_rules."""
    params = seq.sampling_params
    rules = [(FOREVER, bias, (token_id,)) for token_id, bias in params.logit_bias]
    rules += [(FOREVER, BAN, tuple(word)) for word in seq.bad_words]
    if params.min_tokens:
        until = seq.num_prompt_tokens + params.min_tokens
        rules += [(until, BAN, (token_id,)) for token_id in sorted(seq.end_token_ids)]
    return rules


def _drawn(seq: "Sequence") -> list[tuple[int, int]]:
    """(position, token id) of the completion so far."""
    return list(enumerate(seq.completion_token_ids, seq.num_prompt_tokens))


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
    return np.array([list(values), list(values.values())], dtype=np.int64)
