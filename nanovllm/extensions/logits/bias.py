"""Biases, banned tokens and words, and ends that come too early: rules, each of which adds a number to the
logit of one token. kernels/logit_edits.py says what a rule is.

Rules come and go with their requests, unlike everything else on a device. So there is a bound on the memory
that those of all running requests take together, and requests wait whose rules do not fit: `BiasBudget`.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.policies import Admission, Admitting, Hit, Verdict
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transfer import to_device
from nanovllm.extensions.logits.kernels.logit_edits import HISTORY, RULE_FIELDS, apply_rules
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import shown

RULE_WORDS = 1 << 22  # int32, of all running requests
FOREVER = 2**31 - 1  # a position that no sequence reaches
# Added to the logit of a banned token. Not -inf, which tokens outside allowed_token_ids have: where all the
# allowed ones are banned, one of them is drawn all the same.
BAN = -1e30


class BiasRequest(NamedTuple):
    bad_words: list[list[int]]  # as token ids
    num_words: int  # int32 that its rules take on a device


def num_rule_words(params: SamplingParams, bad_words: list[list[int]], end_token_ids: Collection[int]) -> int:
    """The most int32 words that the rules of a request take on a device."""
    num_rules = len(params.logit_bias) + len(bad_words) + (len(end_token_ids) if params.min_tokens else 0)
    return 1 + RULE_FIELDS * num_rules + sum(len(word) - 1 for word in bad_words)


def rules_of(seq: Sequence, bad_words: list[list[int]]) -> np.ndarray:
    """The rules of a request as int32 words; `apply_rules` describes them."""
    params = seq.sampling_params
    # One rule a token: a device adds rules in any order, on which the sum of floats would depend.
    biases = Counter()
    for token_id, bias in params.logit_bias:
        biases[token_id] += bias
    ends = sorted(seq.request.end_token_ids) if params.min_tokens else []
    words = [[token_id] for token_id in biases] + bad_words + [[token_id] for token_id in ends]
    lengths = [len(word) - 1 for word in words]
    number, num_biases, num_ends = len(words), len(biases), len(ends)
    until = min(seq.num_prompt_tokens + params.min_tokens, FOREVER)
    added = np.array([*biases.values()] + [BAN] * (number - num_biases), dtype=np.float32)
    rules = [number] + [FOREVER] * (number - num_ends) + [until] * num_ends
    rules += added.view(np.int32).tolist()
    rules += [word[-1] for word in words]
    rules += list(itertools.accumulate(lengths, initial=1 + RULE_FIELDS * number))[1:]
    rules += lengths
    rules += [token_id for word in words for token_id in word[:-1]]
    return np.array(rules, dtype=np.int32)


def history_of(seq: Sequence) -> list[tuple[int, int]]:
    """Where in the flattened history the completion's last tokens stand, and their ids."""
    start = max(seq.num_prompt_tokens, len(seq.token_ids) - HISTORY)
    last = enumerate(seq.token_ids[start:], start)
    return [(seq.slot * HISTORY + position % HISTORY, token_id) for position, token_id in last]


class BiasMessage(NamedTuple):
    dropped: list[int]  # slots whose rules are no longer needed
    rules: dict[int, np.ndarray]  # by slot, see `rules_of`
    history: np.ndarray  # int64 [tokens, 2], index and token id


class BiasProcessor(LogitsProcessor):
    name = "bias"
    fields = ("logit_bias", "bad_words", "min_tokens")
    order = 10
    reserved_bytes = 2 * 4 * RULE_WORDS  # a second time while they are copied

    def __init__(self) -> None:
        self._in_slots: dict[int, Sequence] = {}  # whose rules the devices have
        # Each slot's rules are a tensor of their own. Steps under way may still read one that is dropped
        # here: its memory is reused only by later work of the same stream.
        self.rules: dict[int, Tensor] = {}

    def start(self, config: Any, prompts: Any) -> None:
        self.prompts = prompts
        self._bad_word = functools.lru_cache(1024)(self._read_bad_word)

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias or params.bad_words or params.min_tokens)

    def read(self, request: Any, where: str) -> BiasRequest:
        params = request.params
        self.prompts.check_has_tokenizer("bad_words", params.bad_words, where)
        self.prompts.check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], where)
        bad_words = self.bad_words(params)
        size = num_rule_words(params, bad_words, self.prompts.limits.end_token_ids(params))
        if size > RULE_WORDS:
            raise ValueError(
                f"{where}: bad_words of {sum(map(len, bad_words)):,} tokens and logit_bias of "
                f"{len(params.logit_bias):,} take {4 * size:,} bytes of the device's memory, "
                f"of which all requests together may have {4 * RULE_WORDS:,}"
            )
        return BiasRequest(bad_words, size)

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The bad words as token ids."""
        return list(itertools.chain.from_iterable(map(self._bad_word, params.bad_words)))

    def _read_bad_word(self, text: str) -> list[list[int]]:
        """
        Its token ids at the beginning of a text and after a space, for which most tokenizers have different
        tokens. Leaves out what contains tokens that the model never draws.
        """
        starts = (start + text.lstrip(" ") for start in ("", " "))
        tokenize = self.prompts.tokenize
        token_ids = [ids for start in starts if (ids := tokenize(start, "bad_words", False))]
        if not token_ids:
            raise ValueError(f"bad_words has {shown(text)}, of which the tokenizer makes no token")
        if (longest := max(map(len, token_ids))) > HISTORY:
            rule = f"each of bad_words must have at most {HISTORY} tokens"
            raise ValueError(f"{rule}, got {longest} of {shown(text)}")
        distinct = [ids for i, ids in enumerate(token_ids) if ids not in token_ids[:i]]
        return [ids for ids in distinct if max(ids) < self.prompts.vocab_size]

    def num_words(self, seq: Sequence) -> int:
        """How many int32 words its rules take; 0 if it has none."""
        return seq.request.own[self.name].num_words if self.name in seq.request.own else 0

    def prepare(self, sequences: list[Sequence]) -> BiasMessage | None:
        dropped = [slot for slot, seq in self._in_slots.items() if seq.slot != slot]
        for slot in dropped:
            del self._in_slots[slot]
        here = {seq.slot: seq for seq in sequences if self.name in seq.request.own}
        if not (dropped or here):
            return None
        self._in_slots.update(here)
        rules = {slot: rules_of(seq, seq.request.own[self.name].bad_words) for slot, seq in here.items()}
        history = list(itertools.chain.from_iterable(map(history_of, here.values())))
        return BiasMessage(dropped, rules, np.array(history, dtype=np.int64).reshape(-1, 2))

    def allocate(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.history = torch.full((num_slots, HISTORY), -1, dtype=torch.int32, device=device)
        self.addresses = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def receive(self, message: BiasMessage) -> None:
        device = self.history.device
        slots = [*message.dropped, *message.rules]
        for slot in slots:
            self.rules.pop(slot, None)
        if message.rules:
            rules = to_device(np.concatenate(list(message.rules.values())), device)
            parts = torch.split_with_sizes_copy(rules, list(map(len, message.rules.values())))
            self.rules.update(zip(message.rules, parts, strict=True))
            self.history[to_device(np.array(list(message.rules)), device)] = -1
            index, token_ids = to_device(message.history, device).unbind(1)
            self.history.view(-1)[index] = token_ids.int()
        addresses = [self.rules[slot].data_ptr() if slot in self.rules else 0 for slot in slots]
        index, values = to_device(np.array([slots, addresses]), device)
        self.addresses[index] = values

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        logits = logits.float()
        apply_rules(logits, step.slots, step.positions, self.rules, self.addresses, self.history)
        return logits

    def drawn(self, raw_logits: Tensor, tokens: Tensor, step: SamplingStep) -> None:
        self.history.index_put_((step.slots, step.positions % HISTORY), tokens.int())

    def reset(self) -> None:
        """A slot's history is written before it is read."""
        self._in_slots.clear()
        self.rules.clear()
        self.addresses.zero_()

    def close(self) -> None:
        self.rules.clear()
        del self.history, self.addresses


class BiasBudget(Admission):
    """Bounds the memory that the rules of all running requests take on a device together."""

    def __init__(self, bias: BiasProcessor):
        self.bias = bias

    def begin(self, num_running: int, max_num_seqs: int) -> int:
        self.num_words: int | None = None  # of those that run and are admitted
        return max_num_seqs

    def admits(self, seq: Sequence, hit: Hit, state: Admitting) -> Verdict:
        if self.bias.name not in seq.request.own:
            return Verdict.ADMIT
        if self.num_words is None:
            there = [*state.running, *(other for other, _ in state.waiting)]
            self.num_words = sum(map(self.bias.num_words, there))
        self.num_words += self.bias.num_words(seq)
        return Verdict.ADMIT if self.num_words <= RULE_WORDS else Verdict.STOP
