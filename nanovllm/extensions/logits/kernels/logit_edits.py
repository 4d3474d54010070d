"""Changes to logits before a token is drawn. Rows that ask for none are not touched.

Biases, and banned tokens and words, are rules; penalties and allowed tokens are token flags.

A rule adds a number to one token's logit, if the sequence has not reached a certain length and the tokens
drawn last are those that the rule names. A token's flags say how often the completion has it, whether the
prompt has it, and whether it is banned.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import MINUS_INF, cdiv, masked_load, tl, triton, use_triton

RULE_FIELDS = 5  # see apply_rules
HISTORY = 1024  # how many of the tokens drawn last are kept; a power of 2
IN_PROMPT, BANNED = 1 << 30, 1 << 29  # token flags; the bits below count occurrences in the completion
PROGRAMS_A_ROW = 8  # share a row's rules, so that other rows do not wait long for one with very many
RULES_AT_ONCE, TOKENS_AT_ONCE = tl.constexpr(128), tl.constexpr(16)
BLOCK = tl.constexpr(4096)


class Penalties(NamedTuple):
    """A row's penalties, in the order of the table's columns."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 0.0  # 0: the row's token flags mean nothing


def apply_rules(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    rules: dict[int, Tensor],
    addresses: Tensor,
    history: Tensor,
) -> None:
    """Change logits float32 [batch, vocabulary] in place.

    rows int32 [batch] are the sequences' rows of rules and history; positions [batch] are those of the
    tokens to be drawn. rules has an int32 tensor for each row that has rules: their number n, then
    RULE_FIELDS fields of n numbers each
      the position from which on the rule does not apply
      the bits of the float32 that it adds
      the token whose logit it changes
      the index in this tensor where the rule's preceding tokens end, which must have been drawn just before
      how many those are, at most HISTORY
    and then the preceding tokens of all rules. addresses int64 [rows] are the addresses of these tensors, 0
    for a row without rules: so a kernel in a CUDA graph finds tensors that were made after its capture.
    history int32 [rows, HISTORY] has the token drawn at each position modulo HISTORY, -1 where none was.
    """
    if not use_triton(logits):
        return apply_rules_torch(logits, rows, positions, rules, history)
    _rules_kernel[(len(logits), PROGRAMS_A_ROW)](
        logits,
        rows,
        positions,
        addresses,
        history,
        logits.stride(0),
        HISTORY=HISTORY,
    )


def apply_rules_torch(
    logits: Tensor, rows: Tensor, positions: Tensor, rules: dict[int, Tensor], history: Tensor
) -> None:
    for x, row, position in zip(logits, rows.tolist(), positions.tolist(), strict=True):
        if row not in rules:
            continue
        words, number = rules[row], int(rules[row][0])
        until, added, token, end, length = words[1 : 1 + RULE_FIELDS * number].view(RULE_FIELDS, number)
        holds = position < until
        left = (holds & (length > 0)).nonzero()[:, 0]  # rules whose preceding tokens agree so far
        back = 1
        while len(left):
            agrees = words[end[left] - back] == history[row, (position - back) % HISTORY]
            holds[left[~agrees]] = False
            left = left[agrees & (length[left] > back)]
            back += 1
        x.index_add_(0, token[holds], added.view(torch.float32)[holds])


def apply_token_flags(logits: Tensor, rows: Tensor, penalties: Tensor, token_flags: Tensor) -> None:
    """Change logits float32 [batch, vocabulary] in place.

    penalties float32 [batch, 3] are Penalties. token_flags is int32 [rows, vocabulary]; rows int32 [batch]
    are the sequences' rows of it. Both are contiguous.
    """
    if not use_triton(logits):
        return apply_token_flags_torch(logits, rows, penalties, token_flags)
    batch, vocab = logits.shape
    _token_flags_kernel[(cdiv(vocab, BLOCK.value), batch)](
        logits,
        rows,
        penalties,
        token_flags,
        logits.stride(0),
        vocab,
        BANNED=BANNED,
        num_warps=8,
    )


def apply_token_flags_torch(logits: Tensor, rows: Tensor, penalties: Tensor, token_flags: Tensor) -> None:
    flagged = Penalties(*penalties.unbind(1)).repetition > 0
    presence, frequency, repetition = penalties[flagged, :, None].unbind(1)
    x, flags = logits[flagged], token_flags[rows[flagged].long()]
    count = flags & (BANNED - 1)
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(flags & ~BANNED > 0, repeated, x)
    x = x - frequency * count - presence * (count > 0)
    logits[flagged] = x.masked_fill(flags & BANNED > 0, -torch.inf)


@triton.jit
def _rules_kernel(
    logits,
    rows,
    positions,
    addresses,
    history,
    logits_stride,
    HISTORY: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    address = tl.load(addresses + row)
    if address != 0:
        words = address.to(tl.pointer_type(tl.int32))
        number = tl.load(words)
        position = tl.load(positions + i)
        first = tl.program_id(1) * RULES_AT_ONCE
        for start in range(first, number, tl.num_programs(1) * RULES_AT_ONCE):
            index = start + tl.arange(0, RULES_AT_ONCE)
            inside = index < number
            rule = words + 1 + index
            until = masked_load(rule, inside)
            end = masked_load(rule + 3 * number, inside)
            length = masked_load(rule + 4 * number, inside)
            holds = inside & (position < until)
            compared = 0
            while tl.max(tl.where(holds, length, 0), axis=0) > compared:  # of those that still hold
                back = compared + 1 + tl.arange(0, TOKENS_AT_ONCE)
                drawn = tl.load(history + row * HISTORY + ((position - back) & (HISTORY - 1)))
                wanted = holds[:, None] & (back[None, :] <= length[:, None])
                token = masked_load(words + (end[:, None] - back[None, :]), wanted)
                differs = (wanted & (token != drawn[None, :])).to(tl.int32)
                holds = holds & (tl.max(differs, axis=1) == 0)
                compared += TOKENS_AT_ONCE
            added = masked_load(rule + number, inside).to(tl.float32, bitcast=True)
            token = masked_load(rule + 2 * number, inside)
            tl.atomic_add(logits + i * logits_stride + token, added, mask=holds, sem="relaxed")


@triton.jit
def _token_flags_kernel(
    logits,
    rows,
    penalties,
    token_flags,
    logits_stride,
    vocab,
    BANNED: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    penalty = penalties + i * 3
    presence, frequency, repetition = tl.load(penalty), tl.load(penalty + 1), tl.load(penalty + 2)
    if repetition > 0:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        address = logits + i * logits_stride + column
        x = tl.load(address, mask=inside)
        flags = tl.load(token_flags + tl.load(rows + i).to(tl.int64) * vocab + column, mask=inside)
        count = flags & (BANNED - 1)
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where((flags & ~BANNED) > 0, repeated, x)
        x = x - frequency * count - tl.where(count > 0, presence, 0.0)
        tl.store(address, tl.where((flags & BANNED) > 0, MINUS_INF, x), mask=inside)
