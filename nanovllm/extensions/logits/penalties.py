"""Penalties for tokens that a request has used, and the tokens that it may draw at all.

Both are kept as flags, one int32 for each slot and each token of the vocabulary: kernels/logit_edits.py. The
device counts the tokens that it draws.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import to_device
from nanovllm.extensions.logits.kernels.logit_edits import BANNED, IN_PROMPT, Penalties, apply_token_flags
from nanovllm.extensions.logits.slot_settings import SlotSettings
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import shown

FLAGS_AT_ONCE = 1 << 18  # copied to a device together


def has_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def token_flags_of(seq: Sequence) -> tuple[int, list[tuple[int, int]]]:
    """The flags of all tokens, and what is added to them: a token id and a number each."""
    params = seq.sampling_params
    allowed = params.allowed_token_ids
    added = [(token_id, -BANNED) for token_id in set(allowed or ())]
    if has_penalties(params):
        added += [(token_id, IN_PROMPT) for token_id in set(seq.prompt_token_ids)]
        added += [(token_id, 1) for token_id in seq.completion_token_ids]
    return 0 if allowed is None else BANNED, added


class PenaltyProcessor(SlotSettings):
    name = "penalties"
    fields = ("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids")
    order = 20
    reserved_bytes = 32 * FLAGS_AT_ONCE
    neutral = Penalties()

    def start(self, config: Any, prompts: Any) -> None:
        self.prompts = prompts

    def wants(self, params: SamplingParams) -> bool:
        return has_penalties(params) or params.allowed_token_ids is not None

    def read(self, request: Any, where: str) -> None:
        params = request.params
        allowed = params.allowed_token_ids or ()
        self.prompts.check_token_ids("allowed_token_ids", allowed, where)
        if params.min_tokens and allowed and request.end_token_ids.issuperset(allowed):
            raise ValueError(
                f"{where}: min_tokens={params.min_tokens} is not reached: each of "
                f"allowed_token_ids={shown(allowed)} ends a completion"
            )

    def numbers_of(self, params: SamplingParams) -> Penalties:
        repetition = min(max(params.repetition_penalty, 1e-6), 1e6)
        return Penalties(params.presence_penalty, params.frequency_penalty, repetition)

    def prepare(self, sequences: list[Sequence]) -> Any:
        """
        The settings; slots that get new flags and those of all their tokens, int64 [slots, 2]; and what is
        added to single ones, int64 [tokens, 2]: index into the flattened table, number.
        """
        fills, added = [], []
        for seq in sequences:
            if self.name in seq.request.own:
                fill, flags = token_flags_of(seq)
                fills.append((seq.slot, fill))
                start = seq.slot * self.vocab_size
                added += [(start + token_id, flag) for token_id, flag in flags]
        settings = super().prepare(sequences)
        fills, added = (np.int64(pairs).reshape(-1, 2) for pairs in (fills, added))
        return settings, fills, added

    def allocate(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        super().allocate(num_slots, vocab_size, device)
        self.vocab_size = vocab_size
        self.token_flags = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)

    def receive(self, message: Any) -> None:
        settings, fills, added = message
        super().receive(settings)
        device = self.token_flags.device
        slots, flags = to_device(fills, device).unbind(1)
        self.token_flags[slots] = flags.int()[:, None]
        table = self.token_flags.view(-1)
        for start in range(0, len(added), FLAGS_AT_ONCE):
            index, flags = to_device(added[start : start + FLAGS_AT_ONCE], device).unbind(1)
            table.index_add_(0, index, flags.int())

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        logits = logits.float()
        apply_token_flags(logits, step.slots, self.table[step.slots], self.token_flags)
        return logits

    def drawn(self, raw_logits: Tensor, tokens: Tensor, step: SamplingStep) -> None:
        self.token_flags[step.slots, tokens] += 1

    def close(self) -> None:
        del self.table, self.token_flags
