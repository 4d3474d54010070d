"""Decides what the next step computes. Knows sequences, lengths and free blocks; nothing about tensors or
devices.

A step is all prefill or all decode, and prefill goes first. Both `waiting` and `running` are in order of
arrival (a preempted sequence goes back to the front), so the oldest running sequence is never preempted by a
younger one.
"""

from collections import deque

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


class Scheduler:
    """
    Progress: every request fits the pool alone (`add` checks it), the oldest running sequence gets its block
    before any younger one and is preempted last, so each decode step brings it one token nearer its end.
    """

    def __init__(self, config: Config):
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = config.max_model_len
        self.eos = frozenset((config.eos,) if isinstance(config.eos, int) else config.eos)
        self.block_manager = BlockManager(
            config.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.chunked: Sequence | None = (
            None  # the running sequence, always the last, whose prefill is not complete
        )
        self.num_preemptions = 0

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queue a request. Raises ValueError if it could never fit, however empty the engine is."""
        self.check(len(seq), seq.max_tokens)
        self.waiting.append(seq)

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ValueError if a request of this size could never be completed."""
        total = num_prompt_tokens + max_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens; with max_tokens={max_tokens} it needs {total}, "
                f"but max_model_len is {self.max_model_len}"
            )
        block_size, num_blocks = self.block_manager.block_size, len(self.block_manager.blocks)
        if total - 1 > num_blocks * block_size:  # the last token is never written to the cache
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens; with max_tokens={max_tokens} it needs "
                f"{-(-(total - 1) // block_size)} KV cache blocks of {block_size} tokens, "
                f"but there are {num_blocks}"
            )

    def schedule(self) -> tuple[list[Sequence], bool]:
        """
        The sequences of the next step, each with its `num_scheduled_tokens`, and whether it is a prefill.
        """
        sequences = self._schedule_prefill()
        if sequences:
            return sequences, True
        return self._schedule_decode(), False

    def _schedule_prefill(self) -> list[Sequence]:
        scheduled: list[Sequence] = []
        budget = self.max_num_batched_tokens
        if (seq := self.chunked) is not None:
            budget -= self._schedule_chunk(seq, budget)
            scheduled.append(seq)
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            num_tokens = len(seq) - self.block_manager.num_cached_tokens(seq)
            if (
                num_tokens > budget and scheduled
            ):  # only a prompt that has a step's budget to itself is chunked
                break
            if not self.block_manager.can_allocate(seq):
                break
            self.block_manager.allocate(seq)
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = SequenceStatus.RUNNING
            budget -= self._schedule_chunk(seq, budget)
            scheduled.append(seq)
        return scheduled

    def _schedule_chunk(self, seq: Sequence, budget: int) -> int:
        remaining = len(seq) - seq.num_computed_tokens
        seq.num_scheduled_tokens = min(remaining, budget)
        self.chunked = seq if remaining > budget else None
        return seq.num_scheduled_tokens

    def _schedule_decode(self) -> list[Sequence]:
        scheduled: list[Sequence] = []
        while len(scheduled) < len(self.running):
            seq = self.running[len(scheduled)]
            while not self.block_manager.can_append(seq):
                youngest = self.running.pop()
                self.preempt(youngest)
                if youngest is seq:
                    break
            else:
                self.block_manager.may_append(seq)
                seq.num_scheduled_tokens = 1
                scheduled.append(seq)
        return scheduled

    def preempt(self, seq: Sequence) -> None:
        """Take the sequence's blocks; it keeps its tokens and is computed again when there is room."""
        seq.status = SequenceStatus.WAITING
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def postprocess(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """
        Record a step: one token id per scheduled sequence, ignored where the prefill is not complete yet.
        """
        for seq, token_id in zip(sequences, token_ids, strict=True):
            seq.num_computed_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if seq.num_computed_tokens < len(seq):
                continue
            seq.append_token(token_id)
            hit_eos = not seq.ignore_eos and token_id in self.eos
            if hit_eos or seq.num_completion_tokens == seq.max_tokens:
                seq.status = SequenceStatus.FINISHED
                self.block_manager.deallocate(seq)
        if any(seq.is_finished for seq in sequences):
            self.running = [seq for seq in self.running if not seq.is_finished]

    def clear(self) -> None:
        """
        Drop every request after a failed step. What that step wrote is unknown, so nothing stays findable.
        """
        for seq in self.running:
            self.block_manager.deallocate(seq)
        self.block_manager.forget()
        self.running.clear()
        self.waiting.clear()
        self.chunked = None
