"""Changes to logits before a token is drawn. Rows that ask for none are not touched.

Rules are for biases and for banned tokens and words, token flags for penalties and allowed tokens.

A rule adds a number to one token's logit, as long as the sequence is short enough and the tokens drawn last
are those that the rule names. A token's flags say how often the completion has it, whether the prompt has it,
and whether it may not be drawn at all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.runtime import cdiv, tl, triton, use_triton

RULE_FIELDS = 5  # see apply_rules
HISTORY = 1024  # tokens drawn last that are remembered; a power of 2
IN_PROMPT, BANNED = 1 << 30, 1 << 29  # token flags; the bits below count occurrences in the completion
COUNT = BANNED - 1
PROGRAMS_A_ROW = 8  # so that others do not wait long for a row of very many rules
RULES_AT_ONCE = 128
TOKENS_AT_ONCE = 16
BLOCK = 4096


class Penalties(NamedTuple):
    """Of a row, in the order of the table's columns."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    has_flags: float = 0.0  # 0: the row's token flags mean nothing


def apply_rules(
    logits: Tensor, rows: Tensor, positions: Tensor,
    rules: dict[int, Tensor], addresses: Tensor, history: Tensor,
) -> None:  # fmt: skip
    """Change logits float32 [batch, vocabulary] in place.

    rows int32 [batch] says whose rules and history; positions int64 [batch] those of the tokens to be drawn.
    rules has a row's, int32: their number, then RULE_FIELDS numbers of each, field by field
      the position from which the rule holds no longer
      the bits of the float32 that it adds
      the token whose logit changes
      where the tokens end, counted from the beginning of all this, that must have been drawn just before it
      how many those are, at most HISTORY
    and behind the fields those tokens. addresses int64 [rows] says where they lie on the device, and 0 for a
    row that has none: a kernel in a CUDA graph finds them although they come and go. history int32 [rows,
    HISTORY]: the token drawn at each position, modulo HISTORY, and -1 for what was not drawn.
    """
    if not use_triton(logits):
        return apply_rules_torch(logits, rows, positions, rules, history)
    if len(logits):
        _rules_kernel[(len(logits), PROGRAMS_A_ROW)](
            logits, rows, positions, addresses, history, logits.stride(0),
            HISTORY=HISTORY, PROGRAMS=PROGRAMS_A_ROW, BLOCK=RULES_AT_ONCE, TOKENS=TOKENS_AT_ONCE,
            num_warps=4,
        )  # fmt: skip


def apply_rules_torch(
    logits: Tensor, rows: Tensor, positions: Tensor, rules: dict[int, Tensor], history: Tensor
) -> None:
    for x, row, position in zip(logits, rows.tolist(), positions.tolist(), strict=True):
        if row not in rules:
            continue
        words, number = rules[row], int(rules[row][0])
        until, added, token, end, length = words[1 : 1 + RULE_FIELDS * number].view(RULE_FIELDS, number)
        holds = position < until
        left = (holds & (length > 0)).nonzero()[:, 0]  # of which the tokens so far agree
        back = 1
        while len(left):
            agrees = words[end[left] - back] == history[row, (position - back) % HISTORY]
            holds[left[~agrees]] = False
            left = left[agrees & (length[left] > back)]
            back += 1
        x.index_add_(0, token[holds], added.view(torch.float32)[holds])


def apply_token_flags(logits: Tensor, rows: Tensor, penalties: Tensor, token_flags: Tensor) -> None:
    """Change logits float32 [batch, vocabulary] in place.

    penalties float32 [batch, 4]: Penalties. token_flags int32 [rows, vocabulary], of which rows int32 [batch]
    picks the sequences'.
    """
    if not use_triton(logits):
        return apply_token_flags_torch(logits, rows, penalties, token_flags)
    batch, vocab = logits.shape
    if batch:
        _token_flags_kernel[(cdiv(vocab, BLOCK), batch)](
            logits, rows, penalties, token_flags,
            logits.stride(0), penalties.stride(0), token_flags.stride(0), vocab,
            IN_PROMPT=IN_PROMPT, BANNED=BANNED, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def apply_token_flags_torch(logits: Tensor, rows: Tensor, penalties: Tensor, token_flags: Tensor) -> None:
    presence, frequency, repetition, has_flags = Penalties(*penalties.unsqueeze(2).unbind(1))
    flagged = (has_flags > 0).flatten().nonzero().flatten()
    x, flags = logits[flagged], token_flags[rows[flagged].long()]
    count = flags & COUNT
    repeated = torch.where(x > 0, x / repetition[flagged], x * repetition[flagged])
    x = torch.where(flags & (COUNT | IN_PROMPT) > 0, repeated, x)
    x = x - frequency[flagged] * count - presence[flagged] * (count > 0)
    logits[flagged] = x.masked_fill(flags & BANNED > 0, -torch.inf)


@triton.jit
def _rules_kernel(
    logits, rows, positions, addresses, history, logits_stride,
    HISTORY: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    address = tl.load(addresses + row)
    if address != 0:
        words = address.to(tl.pointer_type(tl.int32))
        number = tl.load(words)
        position = tl.load(positions + i)
        for start in range(tl.program_id(1) * BLOCK, number, PROGRAMS * BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < number
            rule = words + 1 + index
            until = tl.load(rule, mask=inside, other=0)
            end = tl.load(rule + 3 * number, mask=inside, other=0)
            length = tl.load(rule + 4 * number, mask=inside, other=0)
            holds = inside & (position < until)
            compared = 0
            longest = tl.max(tl.where(holds, length, 0), axis=0)
            while compared < longest:
                back = compared + 1 + tl.arange(0, TOKENS)
                drawn = tl.load(history + row * HISTORY + ((position - back) & (HISTORY - 1)))
                wanted = holds[:, None] & (back[None, :] <= length[:, None])
                token = tl.load(words + (end[:, None] - back[None, :]), mask=wanted, other=0)
                differs = (wanted & (token != drawn[None, :])).to(tl.int32)
                holds = holds & (tl.max(differs, axis=1) == 0)
                compared += TOKENS
                longest = tl.max(tl.where(holds, length, 0), axis=0)  # of those that still hold
            added = tl.load(rule + number, mask=inside, other=0).to(tl.float32, bitcast=True)
            token = tl.load(rule + 2 * number, mask=inside, other=0)
            tl.atomic_add(logits + i * logits_stride + token, added, mask=holds, sem="relaxed")


@triton.jit
def _token_flags_kernel(
    logits, rows, penalties, token_flags,
    logits_stride, penalties_stride, flags_stride, vocab,
    IN_PROMPT: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1).to(tl.int64)
    penalty = penalties + i * penalties_stride
    has_flags = tl.load(penalty + 3)
    if has_flags > 0:
        presence, frequency, repetition = tl.load(penalty), tl.load(penalty + 1), tl.load(penalty + 2)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        address = logits + i * logits_stride + column
        x = tl.load(address, mask=inside)
        flags = tl.load(token_flags + tl.load(rows + i).to(tl.int64) * flags_stride + column, mask=inside)
        count = flags & (BANNED - 1)
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where((count > 0) | ((flags & IN_PROMPT) > 0), repeated, x)
        x = x - frequency * count - tl.where(count > 0, presence, 0.0)
        tl.store(address, tl.where((flags & BANNED) > 0, float("-inf"), x), mask=inside)
