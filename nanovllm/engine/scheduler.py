"""Decides what the next step computes. Knows sequences, lengths and free blocks; nothing about tensors or
devices.

A step is all prefill or all decode. Prefill goes first, but no more than MAX_PREFILLS_IN_A_ROW steps while
a sequence waits to decode. `waiting` is in order of arrival (a preempted sequence goes back to the front) and
`running` in order of admission, so the first to run is never preempted for a later one. A sequence is
admitted if there are blocks for all its tokens and no `Admission` objects; where the blocks do not suffice
later, the youngest is preempted.

An Admission may have a sequence wait for a step. It keeps its place in front of all that arrived later, and
what these are given meanwhile leaves it the slot and the blocks that it needs.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from operator import attrgetter
from typing import Any

from nanovllm.engine.block_manager import BlockManager, Hit, PrefixCache, tell_nobody
from nanovllm.engine.sequence import Sequence, SequenceStatus

MAX_PREFILLS_IN_A_ROW = 4  # while a sequence waits to decode


class Verdict(IntEnum):
    """Of several the highest counts."""

    ADMIT = 0
    WAIT = 1  # not in this step, but those behind it may be admitted. Nobody has to wait twice
    STOP = 2  # neither it nor those behind it, before a sequence ends or gives blocks back


class Admission:
    """
    Has a say in which sequences run. All are asked, on rank 0's host; one that has no free blocks, no slot or
    no room in the step's tokens is not admitted whatever they say.
    """

    def admits(self, seq: Sequence, hit: Hit, state: Any) -> Verdict:
        """
        Whether this sequence, the first of those that wait, may run. If all say so, it does. `state` is the
        Scheduler; its `running` has those that are already admitted, and `held_back`, a new list in each
        step, those that join in the next one.
        """
        return Verdict.ADMIT

    def ended(self, seq: Sequence) -> None:
        """The sequence has ended; its `finish_reason` says why."""


class SchedulingPolicy:
    """
    Chooses what the next step computes, on rank 0's host, while the tokens of the step in flight are not yet
    known. The Scheduler keeps what must hold: limits, blocks, one unfinished prompt.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)  # seconds; a simulation has one of its own

    def start(self, scheduler: Any) -> None:
        """The Scheduler is made. What it has is for reading."""
        self.scheduler = scheduler

    def order(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """
        Who is asked to be admitted, first to last; some may be left out. `waiting` is in order of arrival,
        behind those that were preempted. `scheduler.blocked` did not fit, and ends the row.
        """
        return waiting

    def prefers_prefill(self, num_prefills_in_a_row: int) -> bool:
        """Whether a prompt is computed next where sequences have waited so many steps to decode."""
        return num_prefills_in_a_row < MAX_PREFILLS_IN_A_ROW

    def chunk(self, seq: Sequence, num_tokens: int) -> int:
        """How many of a prompt's next tokens are computed now, 1 to this, which the step has room for."""
        return num_tokens

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who loses its blocks when there are none. `running` is in order of admission."""
        return running[-1]


class Scheduler:
    """
    Why all requests end: each fits the pool alone (`InputProcessor.check_length`), and the oldest running
    sequence gets its block first and is preempted last, so that each decode step brings it one token nearer
    its end.
    """

    def __init__(
        self,
        config: Any,
        prefix_cache: PrefixCache | None = None,
        admissions: tuple[Admission, ...] = (),
        policy: SchedulingPolicy | None = None,
        tell: Callable[..., None] = tell_nobody,
    ):
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.block_size = config.kvcache_block_size
        # How many tokens back the model looks, 0: to the first. 2 at least, since a block is closed a step
        # after its last token has been drawn.
        reach = config.hf_config.tokens_in_reach
        self.reach = reach and max(2, reach)
        self.block_manager = BlockManager(
            config.num_kvcache_blocks, self.block_size, config.enable_prefix_caching, prefix_cache, tell
        )
        self.admissions = admissions
        self.policy = policy or SchedulingPolicy()
        self.tell = tell  # whoever watches
        self.clear()
        self.policy.start(self)
        self.num_preemptions = 0
        self.num_drawn_tokens = 0  # without those for sequences that had ended before

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queue a request. It must fit the pool alone."""
        self.waiting[seq] = None

    def schedule(self) -> tuple[list[Sequence], bool]:
        """The sequences of the next step, each with its `num_scheduled_tokens`, and if it is a prefill."""
        has_chunk = self.chunked is not None
        can_decode = len(self.running) > has_chunk
        if self.waiting or has_chunk:
            may_prefill = not can_decode or self.policy.prefers_prefill(self.num_prefills_in_a_row)
            if may_prefill and (sequences := self._schedule_prefill()):
                self.num_prefills_in_a_row += can_decode
                return sequences, True
        self.num_prefills_in_a_row = 0
        return self._schedule_decode(), False

    def _schedule_prefill(self) -> list[Sequence]:
        scheduled, budget = [], self.max_num_batched_tokens
        if (seq := self.chunked) is not None:
            budget -= self._schedule_chunk(seq, budget)
            scheduled.append(seq)
        self.held_back: list[tuple[Sequence, Hit]] = []  # by WAIT
        for seq in self.policy.order(self.waiting):
            has_room = budget and self.chunked is None and len(self.free_slots) > len(self.held_back)
            if seq is self.blocked or not has_room:
                break
            hit = self.block_manager.prefix_cache.find(seq)
            verdicts = [admission.admits(seq, hit, self) for admission in self.admissions]
            verdict = max(verdicts, default=Verdict.ADMIT)
            if seq.num_tokens - hit.num_tokens > budget and scheduled and verdict is not Verdict.WAIT:
                break  # only a prompt that has a whole step to itself is computed in chunks
            if verdict is Verdict.STOP or not self.block_manager.can_allocate(seq, hit):
                if not scheduled:  # else the next step may have more room
                    self.blocked = seq
                break
            if verdict is Verdict.WAIT:
                self.held_back.append((seq, hit))
                continue
            self.block_manager.allocate(seq, hit)
            self.running.append(seq)
            seq.status = SequenceStatus.RUNNING
            seq.slot = self.free_slots.pop()
            if seq.num_prompt_tokens_cached is None:
                seq.num_prompt_tokens_cached = seq.num_cached_tokens
            budget -= self._schedule_chunk(seq, budget)
            scheduled.append(seq)
            self.tell("admitted", seq, hit)
        for seq in scheduled:
            self.waiting.pop(seq, None)
        return scheduled

    def _schedule_chunk(self, seq: Sequence, budget: int) -> int:
        remaining = seq.num_tokens - seq.num_computed_tokens
        seq.num_scheduled_tokens = self.policy.chunk(seq, min(remaining, budget))
        self.chunked = seq if remaining > seq.num_scheduled_tokens else None
        return seq.num_scheduled_tokens

    def _schedule_decode(self) -> list[Sequence]:
        block_size, chunked = self.block_size, self.chunked
        for seq in list(self.running):  # oldest first
            if seq is chunked or seq.slot < 0:  # preempted for one before
                continue
            seq.num_scheduled_tokens = 1
            if seq.num_tokens % block_size > 1:
                continue  # in the middle of a block nothing is opened or closed
            while not self.block_manager.can_append(seq):
                self.preempt(self.policy.victim(self.running))
                if seq.slot < 0:  # it was the victim itself
                    break
            else:
                self.block_manager.may_append(seq)
        # Longest first: attention ends sooner if the work that begins last is small.
        decoding = self.running if self.chunked is None else self.running[:-1]
        return sorted(decoding, key=attrgetter("num_tokens"), reverse=True)

    def preempt(self, seq: Sequence) -> None:
        """Take the sequence's blocks. It keeps its tokens, and is computed again when there is room."""
        seq.status = SequenceStatus.WAITING
        self._release(seq)
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1
        self.tell("preempted", seq)

    def advance(self, sequences: list[Sequence]) -> dict[Sequence, int]:
        """
        Count a step as in flight, so that the next one can be scheduled before its tokens are known. Returns
        the sequences that draw a token in it, all but one whose prompt is not yet computed to its end, and
        the positions of these tokens.
        """
        drawing = {}
        for seq in sequences:
            seq.num_computed_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if self.reach:  # the next token is within it
                num_past = (seq.num_computed_tokens + 1 - self.reach) // self.block_size
                if num_past > seq.num_released_blocks:
                    self.block_manager.release(seq, num_past)
                    self.blocked = None
            if seq.num_computed_tokens == seq.num_tokens:
                drawing[seq] = seq.num_tokens
                seq.num_tokens += 1
                if seq.num_tokens == seq.request.max_num_tokens:
                    self._release(seq)  # its last token needs neither slot nor blocks
        return drawing

    def postprocess(self, sequences: Collection[Sequence], token_ids: list[int]) -> list[Sequence]:
        """
        Record the tokens of a step, and return the sequences that end with them. `sequences` are those that
        draw, which `advance` returned when the step began. Steps are recorded in order.
        """
        finished, block_size, over = [], self.block_size, SequenceStatus.FINISHED
        for seq, token_id in zip(sequences, token_ids, strict=False):
            if seq.status is over:  # ended by the token before, which was not known when this step began
                self.num_drawn_tokens -= 1
                continue
            seq.append_token(token_id)
            num_known = len(seq.token_ids)
            if num_known % block_size == 0 and seq.num_computed_tokens >= num_known:
                self.block_manager.close_newest(seq)
            is_stop = token_id in seq.request.end_token_ids
            if is_stop or num_known == seq.request.max_num_tokens:
                by_request = is_stop and token_id in seq.request.params.stop_token_ids
                self.end(seq, "stop" if is_stop else "length", seq.last_token if by_request else None)
                finished.append(seq)
        self.num_drawn_tokens += len(sequences)
        return finished

    def end(self, seq: Sequence, reason: str, stop_reason: Any = None) -> None:
        """
        End a sequence, also one that has ended by its newest token: its text has come to contain a stop text.
        """
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.is_finished:
            return
        seq.num_tokens = len(seq.token_ids)
        for admission in self.admissions:
            admission.ended(seq)
        # It may have been preempted or released while its last token was in flight.
        if seq.status == SequenceStatus.WAITING:
            del self.waiting[seq]
        elif seq.slot >= 0:
            self._release(seq)
        seq.status = SequenceStatus.FINISHED

    def _release(self, seq: Sequence) -> None:
        """It does not run any more."""
        self.running.remove(seq)
        if seq is self.chunked:
            self.block_manager.forget_uncomputed(seq)
            self.chunked = None
        self.blocked = None
        self.block_manager.deallocate(seq)
        self.free_slots.append(seq.slot)
        seq.slot = -1

    def clear(self, kept: Iterable[Sequence] = ()) -> None:
        """
        Drop every request, in whatever state a failed step has left it, but these, in order of arrival: they
        are queued and computed again from their tokens. What the step wrote is unknown, so nothing that the
        cache holds is kept.
        """
        self.block_manager.reset()
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # any of them may leave at any time
        self.running: list[Sequence] = []
        self.chunked: Sequence | None = None  # is in the middle of its prompt; the last of `running`
        self.blocked: Sequence | None = None  # did not fit, and will not until blocks are given back
        self.num_prefills_in_a_row = 0  # while a sequence waited to decode
        self.free_slots = [*reversed(range(self.max_num_seqs))]  # of the devices' tables, see slots.py
        for seq in kept:
            seq.restart()
            self.waiting[seq] = None
