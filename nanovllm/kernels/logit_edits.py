"""Changes to logits before a token is drawn. Rows that ask for none are not touched.

Rules are for biases and for banned tokens and words, marks for penalties and allowed tokens.

A rule adds a number to one token's logit, as long as the sequence is short enough and the tokens drawn last
are those that the rule names. A mark says of one token of the vocabulary how often the completion has it,
whether the prompt has it, and whether it may not be drawn at all.
"""

import torch
from torch import Tensor

from nanovllm.kernels.runtime import cdiv, tl, triton, use_triton

FOREVER = 2**31 - 1
ANY = -1  # stands for a token before those that a rule names
IN_PROMPT, BANNED = 1 << 30, 1 << 29  # marks; what is below counts occurrences in the completion
COUNT = BANNED - 1
RULES_AT_ONCE = 64
BLOCK = 4096


def apply_rules(
    logits: Tensor, rows: Tensor, positions: Tensor, num_rules: Tensor, rules: Tensor, history: Tensor
) -> None:
    """Change logits float32 [batch, vocabulary] in place.

    rows int32 [batch] says where a sequence's rules and history are; positions int64 [batch] those of the
    tokens to be drawn; num_rules [batch]. rules int32 [rows, most rules, 3 or more]: the position from which
    a rule holds no longer, the bits of the float32 that it adds, then tokens right-aligned, of which the last
    is the one whose logit changes and those before it must have been drawn last (or are ANY). history int32
    [rows, positions]: what was drawn where, and -1 for what was not drawn.
    """
    if not use_triton(logits):
        return apply_rules_torch(logits, rows, positions, num_rules, rules, history)
    if len(logits):
        _rules_kernel[(len(logits),)](
            logits,
            rows,
            positions,
            num_rules,
            rules,
            history,
            logits.stride(0),
            num_rules.stride(0),
            rules.stride(0),
            history.stride(0),
            WIDTH=rules.shape[2],
            BLOCK=RULES_AT_ONCE,
            num_warps=2,
        )


def apply_rules_torch(
    logits: Tensor, rows: Tensor, positions: Tensor, num_rules: Tensor, rules: Tensor, history: Tensor
) -> None:
    rows, rules = rows.long(), rules[rows.long()]
    holds = torch.arange(rules.shape[1], device=rules.device) < num_rules[:, None]
    holds &= positions[:, None] < rules[..., 0]
    for back in range(1, rules.shape[2] - 2):
        drawn = history[rows, (positions - back).clamp_min(0)].masked_fill(positions < back, -1)
        named = rules[..., -1 - back]
        holds &= (named == ANY) | (named == drawn[:, None])
    added = rules[..., 1].contiguous().view(torch.float32).masked_fill(~holds, 0.0)
    logits.scatter_add_(1, rules[..., -1].long().clamp_min(0), added)


def apply_marks(logits: Tensor, rows: Tensor, penalties: Tensor, marks: Tensor) -> None:
    """Change logits float32 [batch, vocabulary] in place.

    penalties float32 [batch, 4]: presence, frequency and repetition penalty as SamplingParams has them, and
    whether the row has marks at all. marks int32 [rows, vocabulary], of which rows int32 [batch] picks the
    sequences'.
    """
    if not use_triton(logits):
        return apply_marks_torch(logits, rows, penalties, marks)
    batch, vocab = logits.shape
    if batch:
        _marks_kernel[(cdiv(vocab, BLOCK), batch)](
            logits,
            rows,
            penalties,
            marks,
            logits.stride(0),
            penalties.stride(0),
            marks.stride(0),
            vocab,
            BLOCK=BLOCK,
            num_warps=8,
        )


def apply_marks_torch(logits: Tensor, rows: Tensor, penalties: Tensor, marks: Tensor) -> None:
    marked = (penalties[:, 3] > 0).nonzero().flatten()
    presence, frequency, repetition = penalties[marked, :3, None].unbind(1)
    x, mark = logits[marked], marks[rows[marked].long()]
    count = mark & COUNT
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(mark & (COUNT | IN_PROMPT) > 0, repeated, x)
    x = x - frequency * count - presence * (count > 0)
    logits[marked] = x.masked_fill(mark & BANNED > 0, -torch.inf)


@triton.jit
def _rules_kernel(
    logits,
    rows,
    positions,
    num_rules,
    rules,
    history,
    logits_stride,
    num_rules_stride,
    rules_stride,
    history_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    position = tl.load(positions + i)
    number = tl.load(num_rules + i * num_rules_stride).to(tl.int32)
    for start in range(0, number, BLOCK):
        index = start + tl.arange(0, BLOCK)
        rule = rules + row * rules_stride + index * WIDTH
        inside = index < number
        holds = inside & (position < tl.load(rule, mask=inside, other=0))
        for back in tl.static_range(1, WIDTH - 2):
            named = tl.load(rule + (WIDTH - 1 - back), mask=inside, other=0)
            drawn = tl.load(history + row * history_stride + position - back, mask=position >= back, other=-1)
            holds = holds & ((named == -1) | (named == drawn))
        added = tl.load(rule + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
        token = tl.load(rule + (WIDTH - 1), mask=inside, other=0)
        tl.atomic_add(logits + i * logits_stride + token, added, mask=holds)


@triton.jit
def _marks_kernel(
    logits,
    rows,
    penalties,
    marks,
    logits_stride,
    penalties_stride,
    marks_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    penalty = penalties + i * penalties_stride
    if tl.load(penalty + 3) > 0:
        presence, frequency, repetition = tl.load(penalty), tl.load(penalty + 1), tl.load(penalty + 2)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        address = logits + i * logits_stride + column
        x = tl.load(address, mask=inside)
        mark = tl.load(marks + tl.load(rows + i).to(tl.int64) * marks_stride + column, mask=inside)
        count = mark & 0x1FFFFFFF
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where((mark & 0x5FFFFFFF) > 0, repeated, x)
        x = x - frequency * count - tl.where(count > 0, presence, 0.0)
        tl.store(address, tl.where((mark & 0x20000000) > 0, float("-inf"), x), mask=inside)
