"""How requests change logits: by rules (biases, banned tokens and words), token flags (penalties, allowed
tokens), masks (structured outputs) and filters (top-k, top-p, min-p). kernels/logit_edits.py says
what rules and token flags are.

First come functions that turn a request's parameters into numbers. `HostEdits` collects what a step must send
of them; `DeviceEdits` keeps them in a row for each running sequence and applies them to logits.
"""

from collections import Counter
from collections.abc import Collection
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transfer import to_device
from nanovllm.extensions.logits.budget import RULE_WORDS
from nanovllm.extensions.logits.kernels.filtering import Filters, filter_thresholds
from nanovllm.extensions.logits.kernels.logit_edits import (
    BANNED,
    HISTORY,
    IN_PROMPT,
    RULE_FIELDS,
    Penalties,
    apply_rules,
    apply_token_flags,
)
from nanovllm.extensions.structured.kernels.token_masks import Masks, apply_masks
from nanovllm.extensions.structured.masks import DeviceMasks
from nanovllm.sampling_params import Needs, SamplingParams, has_penalties, has_rules

FLAGS_AT_ONCE = 1 << 18  # copied to a device together
FOREVER = 2**31 - 1  # a position that no sequence reaches
RULES, TOKEN_FLAGS = int(Needs.RULES), int(Needs.TOKEN_FLAGS)  # `&` takes many times as long for an IntFlag
# Added to the logit of a banned token. Not -inf, which tokens outside allowed_token_ids have: where all the
# allowed ones are banned, one of them is drawn all the same.
BAN = -1e30


def num_rule_words(params: SamplingParams, bad_words: list[list[int]], end_token_ids: Collection[int]) -> int:
    """The most int32 words that the rules of a request take on a device; 0 if it has none."""
    if not has_rules(params):
        return 0
    num_rules = len(params.logit_bias) + len(bad_words) + (len(end_token_ids) if params.min_tokens else 0)
    return 1 + RULE_FIELDS * num_rules + sum(len(word) - 1 for word in bad_words)


def settings_of(seq: Sequence) -> list[float]:
    """Temperature, then `Filters`, then `Penalties`, all within what float32 can compute with."""
    params = seq.sampling_params
    # Below 1e-6 it is greedy; above 1e20 all tokens are equally likely.
    temperature = min(params.temperature, 1e20) if params.temperature > 1e-6 else 0.0
    filters = Filters(max(params.top_k, 0), max(params.top_p, 1e-30), params.min_p)
    repetition = min(max(params.repetition_penalty, 1e-6), 1e6)
    has_flags = float(seq.needs & TOKEN_FLAGS > 0)
    penalties = Penalties(params.presence_penalty, params.frequency_penalty, repetition, has_flags)
    return [temperature, *filters, *penalties]


def rules_of(seq: Sequence) -> np.ndarray:
    """The rules of a request as int32 words; `apply_rules` describes them."""
    params = seq.sampling_params
    # One rule a token: a device adds rules in any order, on which the sum of floats would depend.
    biases = Counter()
    for token_id, bias in params.logit_bias:
        biases[token_id] += bias
    ends = sorted(seq.request.end_token_ids) if params.min_tokens else []
    words = [[token_id] for token_id in biases] + seq.bad_words + [[token_id] for token_id in ends]
    lengths = [len(word) - 1 for word in words]
    number, num_biases, num_ends = len(words), len(biases), len(ends)
    until = min(seq.num_prompt_tokens + params.min_tokens, FOREVER)
    rules = [number] + [FOREVER] * (number - num_ends) + [until] * num_ends
    rules += np.array([*biases.values()] + [BAN] * (number - num_biases), np.float32).view(np.int32).tolist()
    rules += [word[-1] for word in words]
    rules += list(accumulate(lengths, initial=1 + RULE_FIELDS * number))[1:]
    rules += lengths
    rules += [token_id for word in words for token_id in word[:-1]]
    return np.array(rules, dtype=np.int32)


def drawn_last(seq: Sequence) -> list[tuple[int, int]]:
    """(position, token id) of the completion's last HISTORY tokens."""
    start = max(seq.num_prompt_tokens, len(seq.token_ids) - HISTORY)
    return list(enumerate(seq.token_ids[start:], start))


def token_flags_of(seq: Sequence) -> tuple[int, dict[int, int]]:
    """The flags of most tokens, and a dict of the others by token id."""
    params = seq.sampling_params
    fill = 0 if params.allowed_token_ids is None else BANNED
    flags = dict.fromkeys(params.allowed_token_ids or (), 0)
    if has_penalties(params):
        for token_id, count in Counter(seq.completion_token_ids).items():
            flags[token_id] = flags.get(token_id, fill) + count
        for token_id in set(seq.prompt_token_ids):
            flags[token_id] = flags.get(token_id, fill) | IN_PROMPT
    return fill, flags


class LogitEdits(NamedTuple):
    """Rules and token flags that rows get. Indices are into the flattened tables of `DeviceEdits`."""

    dropped_rows: list[int]  # whose rules are no longer needed
    rules: dict[int, np.ndarray]  # by row, see `rules_of`
    history: np.ndarray  # int64 [tokens, 2], index and token id
    flagged_rows: np.ndarray  # int64 [rows with token flags]
    flag_fills: np.ndarray  # int32 [rows with token flags], the flags of tokens that are not listed
    token_flags: np.ndarray  # int64 [tokens, 2], index and flags


class HostEdits:
    """The host's half: knows which rows have rules on the devices."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.ruled: dict[int, Sequence] = {}  # by row, the sequence whose rules it has

    def prefill(self, sequences: list[Sequence]) -> LogitEdits | None:
        """What the rows of these sequences need; None if they need nothing and no rules can be dropped."""
        dropped = [row for row, seq in self.ruled.items() if seq.row != row]
        for row in dropped:
            del self.ruled[row]
        ruled = [seq for seq in sequences if seq.needs & RULES]
        flagged = [seq for seq in sequences if seq.needs & TOKEN_FLAGS]
        if not (dropped or ruled or flagged):
            return None
        self.ruled.update({seq.row: seq for seq in ruled})
        flags = list(map(token_flags_of, flagged))
        starts = [seq.row * self.vocab_size for seq in flagged]
        listed = [(start, by_id) for start, (_, by_id) in zip(starts, flags, strict=True)]
        return LogitEdits(
            dropped,
            {seq.row: rules_of(seq) for seq in ruled},
            _pairs({seq.row * HISTORY + i % HISTORY: t for seq in ruled for i, t in drawn_last(seq)}),
            np.array([seq.row for seq in flagged], dtype=np.int64),
            np.array([fill for fill, _ in flags], dtype=np.int32),
            _pairs({start + token_id: flag for start, by_id in listed for token_id, flag in by_id.items()}),
        )


def _pairs(values: dict[int, int]) -> np.ndarray:
    return np.array(list(values.items()), dtype=np.int64).reshape(-1, 2)


class DeviceEdits:
    """The device's half. The tables have a row for each running sequence, see device_rows.py."""

    # Beside the tables: the rules, a second time while they are copied, and flags while they are.
    reserved_bytes = 2 * 4 * RULE_WORDS + 32 * FLAGS_AT_ONCE

    def __init__(self, filters: Tensor, penalties: Tensor, vocab_size: int):
        """filters float32 [rows, 3] and penalties float32 [rows, 4] are written by `DeviceRows`."""
        self.filters, self.penalties = filters, penalties
        self.device, num_rows = filters.device, len(filters)
        self.token_flags = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=self.device)
        self.history = torch.full((num_rows, HISTORY), -1, dtype=torch.int32, device=self.device)
        self.rule_addresses = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.masks = DeviceMasks(num_rows, vocab_size, self.device)
        # Each row's rules are a tensor of their own. Steps under way may still read one that is dropped here:
        # its memory is reused only by later work of the same stream.
        self.rules: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Forget the rules of all rows. A row's flags and history are written before they are read."""
        self.rule_addresses.zero_()
        self.rules.clear()

    def apply(self, edits: LogitEdits) -> None:
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

    def edit_logits(
        self, logits: Tensor, rows: Tensor, positions: Tensor, temperatures: Tensor, needs: Needs
    ) -> tuple[Tensor, Tensor | None, Masks | None]:
        """
        What to draw from: logits [batch, vocabulary]; the lowest that may be drawn in each row, float32
        [batch], where there are filters; and masks that have not been applied. logits [batch, vocabulary] are
        changed only if none of them is needed later; without rules, flags and filters they may be a shard.
        rows int32, positions int64 (of the tokens to be drawn) and temperatures float32 are [batch].
        """
        masks = self.masks.tables if needs & Needs.MASKS else None
        applies_masks = masks is not None and needs & Needs.FILTERS  # which filter what masks leave
        if needs & (Needs.RULES | Needs.TOKEN_FLAGS) or (applies_masks and needs & Needs.LOGPROBS):
            logits = logits.to(torch.float32, copy=True)
        if needs & Needs.RULES:
            apply_rules(logits, rows, positions, self.rules, self.rule_addresses, self.history)
        if needs & Needs.TOKEN_FLAGS:
            apply_token_flags(logits, rows, self.penalties[rows], self.token_flags)
        if not needs & Needs.FILTERS:
            return logits, None, masks
        if applies_masks:
            apply_masks(logits, masks)
        return logits, filter_thresholds(logits, temperatures, self.filters[rows]), None

    def note_drawn(self, rows: Tensor, positions: Tensor, token_ids: Tensor, needs: Needs) -> None:
        """Count the tokens drawn for these rows, int64 [batch], in their history and flags."""
        if needs & Needs.RULES:
            self.history.index_put_((rows, positions % HISTORY), token_ids.int())
        if needs & Needs.TOKEN_FLAGS:
            index = rows.long() * self.token_flags.shape[1] + token_ids
            self.token_flags.view(-1)[index] += 1
