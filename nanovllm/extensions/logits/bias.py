"""Biases, banned tokens and words, and ends that come too early: rules, each of which adds a number to the
logit of one token. kernels/logit_edits.py says what a rule is.

Rules come and go with their requests, unlike everything else on a device. So there is a bound on the memory
that those of all running requests take together: requests wait whose rules do not fit (`Budget` in safety).
"""

import functools
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.interfaces import LogitsProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import to_device
from nanovllm.extensions.logits.kernels.logit_edits import HISTORY, RULE_FIELDS, apply_rules
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import shown

RULE_WORDS = 1 << 22  # int32, of all running requests
FOREVER = 2**31 - 1  # a position that no sequence reaches
# Added to the logit of a banned token. Not -inf, which tokens outside allowed_token_ids have: where all the
# allowed ones are banned, one of them is drawn all the same.
BAN = -1e30


def rules_of(request: Any, bad_words: list[list[int]]) -> np.ndarray:
    """The rules of a request as int32 words; `apply_rules` describes them."""
    params = request.params
    # A device adds rules in any order, on which a sum of floats may depend. So a token's biases are summed up
    # here. Its bans, which hold or not by what was drawn, are no harm: whatever a ban is added to vanishes.
    biases = Counter()
    for token_id, bias in params.logit_bias:
        biases[token_id] += bias
    rules = [(FOREVER, bias, [token_id]) for token_id, bias in biases.items()]
    rules += [(FOREVER, BAN, word) for word in bad_words]
    if params.min_tokens:
        until = min(len(request.token_ids) + params.min_tokens, FOREVER)
        rules += [(until, BAN, [token_id]) for token_id in sorted(request.end_token_ids)]
    fields = []
    before = []
    for until, added, (*preceding, token_id) in rules:
        before += preceding
        end = 1 + RULE_FIELDS * len(rules) + len(before)
        fields.append((until, added, token_id, end, len(preceding)))
    fields = np.reshape(fields, (-1, RULE_FIELDS)).T
    fields[1] = np.float32(fields[1]).view(np.int32)
    return np.concatenate([[len(rules)], *fields, before]).astype(np.int32)


def history_of(seq: Sequence) -> np.ndarray:
    """The completion's last tokens, int32 [HISTORY]: each at its position modulo HISTORY, -1 elsewhere."""
    history = np.full(HISTORY, -1, dtype=np.int32)
    end = len(seq.token_ids)
    start = max(seq.num_prompt_tokens, end - HISTORY)
    history[np.arange(start, end) % HISTORY] = seq.token_ids[start:]
    return history


class BiasProcessor(LogitsProcessor):
    name = "bias"
    fields = ("logit_bias", "bad_words", "min_tokens")
    order = 10
    reserved_bytes = 2 * 4 * RULE_WORDS  # a second time while they are copied

    def __init__(self) -> None:
        self.max_words = RULE_WORDS
        self._in_slots: dict[int, Sequence] = {}  # whose rules the devices have
        # Each slot's rules are a tensor of their own. Steps in flight may still read one that is dropped
        # here: its memory is reused only by later work of the same stream.
        self.rules: dict[int, Tensor] = {}

    def start(self, config: Any, prompts: Any) -> None:
        self.prompts = prompts
        self._bad_word = functools.lru_cache(1024)(self._read_bad_word)

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias or params.bad_words or params.min_tokens)

    def read(self, request: Any, where: str) -> np.ndarray:
        params = request.params
        prompts = self.prompts
        prompts.check_has_tokenizer("bad_words", params.bad_words, where)
        prompts.check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], where)
        bad_words = self.bad_words(params)
        rules = rules_of(request, bad_words)
        if len(rules) > RULE_WORDS:
            raise ValueError(
                f"{where}: bad_words of {sum(map(len, bad_words)):,} tokens and logit_bias of "
                f"{len(params.logit_bias):,} take {rules.nbytes:,} bytes of the device's memory, "
                f"of which all requests together may have {4 * RULE_WORDS:,}"
            )
        return rules

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The bad words as token ids."""
        return [word for text in params.bad_words for word in self._bad_word(text)]

    def _read_bad_word(self, text: str) -> list[list[int]]:
        """
        Its token ids at the beginning of a text and after a space, for which most tokenizers have different
        tokens. Leaves out what contains tokens that the model never draws.
        """
        plain = text.lstrip(" ")
        prompts = self.prompts
        found = [tuple(prompts.tokenize(each, "bad_words", False)) for each in (plain, " " + plain)]
        if not any(found):
            raise ValueError(f"bad_words has {shown(text)}, of which the tokenizer makes no token")
        longest = max(map(len, found))
        if longest > HISTORY:
            raise ValueError(
                f"each of bad_words must have at most {HISTORY} tokens, got {longest} of {shown(text)}"
            )
        return [[*ids] for ids in dict.fromkeys(found) if ids and max(ids) < prompts.vocab_size]

    def prepare(self, sequences: list[Sequence]) -> Any:
        """
        Slots whose rules stay; new rules by slot, see `rules_of`; and the histories of these
        slots, int32 [slots, HISTORY], see `history_of`.
        """
        new = {seq.slot: seq for seq in sequences if self.name in seq.request.own}
        if not (self._in_slots or new):
            return None
        kept = {slot: seq for slot, seq in self._in_slots.items() if seq.slot == slot and slot not in new}
        self._in_slots = kept | new
        rules = {slot: seq.request.own[self.name] for slot, seq in new.items()}
        return [*kept], rules, np.array([*map(history_of, new.values())])

    def allocate(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.history = torch.full((num_slots, HISTORY), -1, dtype=torch.int32, device=device)
        self.addresses = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def receive(self, message: Any) -> None:
        kept, new, history = message
        device = self.history.device
        for slot in self.rules.keys() - kept:
            del self.rules[slot]
        if new:
            sizes = [len(rules) for rules in new.values()]
            rules = to_device(np.concatenate([*new.values()]), device)
            self.rules |= zip(new, torch.split_with_sizes_copy(rules, sizes), strict=True)
            slots = to_device(np.array([*new]), device)
            self.history[slots] = to_device(history, device)
        addresses = [rules.data_ptr() for rules in self.rules.values()]
        slots, addresses = to_device(np.int64([[*self.rules], addresses]), device)
        self.addresses.zero_()[slots] = addresses

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        logits = logits.float()
        apply_rules(logits, step.slots, step.positions, self.rules, self.addresses, self.history)
        return logits

    def drawn(self, raw_logits: Tensor, tokens: Tensor, step: SamplingStep) -> None:
        self.history[step.slots, step.positions % HISTORY] = tokens.int()

    def reset(self) -> None:
        """A slot's history is written before it is read."""
        self._in_slots.clear()
        self.rules.clear()
        self.addresses.zero_()

    def close(self) -> None:
        self.rules.clear()
        del self.history, self.addresses
