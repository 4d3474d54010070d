"""Schedulers that run without a model, and random histories of them that are checked rule by rule.

The model is a fake whose next token depends on every token before it, read through the block tables from a
fake KV cache of slots. A wrong slot, a stale block or a lost token therefore ends in a wrong read or answer.
"""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from block_pool import check_contents, check_pool
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.scheduler import MAX_PREFILLS_IN_A_ROW, Scheduler
from nanovllm.engine.sequence import Request, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

EOS = 0


class ReadingScheduler(Scheduler):
    """Has requests read and checked before they are queued, as the engine does."""

    def __init__(self, config: Any, *parts: Any):
        super().__init__(config, *parts)
        self.prompts = InputProcessor(config, None, ())

    def add(self, seq: Sequence) -> None:
        read = self.prompts.make_request(seq.prompt_token_ids, seq.sampling_params, "prompt")
        most, ends = read.max_num_tokens, read.end_token_ids
        seq.request = replace(seq.request, max_num_tokens=most, end_token_ids=ends)
        super().add(seq)

    def postprocess(
        self, sequences: list[Sequence], token_ids: list[int], drawing: Any = None
    ) -> list[Sequence]:
        """`drawing` is what `advance` returned, if it was called when the step began."""
        return super().postprocess(self.advance(sequences) if drawing is None else drawing, token_ids)


def make_scheduler(is_plain: bool = False, **options) -> Scheduler:
    """With all extensions, or without any."""
    defaults = dict(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=512,
        eos=-1,
        num_kvcache_blocks=32,
        kvcache_block_size=4,
        enable_prefix_caching=True,
        hf_config=SimpleNamespace(context_limit=200_000, tokens_in_reach=0, vocab_size=1_000_000),
        model="a model",
    )
    config = SimpleNamespace(**{**defaults, **options})
    config.eos = (config.eos,) if isinstance(config.eos, int) else config.eos
    if is_plain:
        return ReadingScheduler(config)
    from nanovllm.engine.block_manager import PrefixCache
    from nanovllm.extensions.logits.bias import BiasProcessor
    from nanovllm.extensions.prefixes.token_prefixes import HoldBack, TokenPrefixes
    from nanovllm.extensions.safety.admission import AdmissionControl

    prefix_cache = TokenPrefixes() if config.enable_prefix_caching else PrefixCache()
    parts = prefix_cache, (HoldBack(), AdmissionControl(config, BiasProcessor()))
    return ReadingScheduler(config, *parts)


def make_engine(**options) -> "tuple[Scheduler, FakeRunner]":
    scheduler = make_scheduler(**options)
    return scheduler, FakeRunner(scheduler)


def forecast_of(scheduler: Scheduler) -> Any:
    return next(part for part in scheduler.admissions if hasattr(part, "share"))


def hold_back_of(scheduler: Scheduler) -> Any:
    return next(part for part in scheduler.admissions if hasattr(part, "have_waited"))


def make_sequence(tokens, max_tokens: int = 8, ignore_eos: bool = False, block_size: int = 4) -> Sequence:
    return Sequence(Request(list(tokens), SamplingParams(0.0, max_tokens, ignore_eos), block_size))


def give_rules(seq: Sequence, num_words: int) -> None:
    """Biases or bans that take so many words on a device."""
    seq.request.own["bias"] = range(num_words)


def next_token(tokens) -> int:
    """What the fake model says after these tokens: 0 (the end) to 3."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
    return (value >> 3) % 4


def expected_completion(prompt, max_tokens: int, eos: tuple[int, ...]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """
    Computes scheduled tokens: writes each position's slot, then reads everything that attention would read.

    Like a device it remembers the tokens that it drew, so that a step can begin before the host knows them.
    """

    def __init__(self, scheduler: Scheduler):
        self.block_size = scheduler.block_size
        self.prefix_cache = scheduler.block_manager.prefix_cache
        self.cache: dict[
            int, tuple[int, ...]
        ] = {}  # slot -> all tokens up to the position that was written there
        self.texts: dict[int, list[int]] = {}  # by seq_id: the prompt and what was drawn after it

    def slot(self, sequence: Sequence, position: int) -> int:
        return (
            sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size
        )

    def run(self, sequences: list[Sequence], is_prefill: bool) -> list[int]:
        spans, size = [], self.block_size
        message = self.prefix_cache.prepare(sequences) if is_prefill else None
        for source, target, num_tokens in [] if message is None else message.tolist():
            for i in range(num_tokens):
                self.cache[target * size + i] = self.cache[source * size + i]
        for sequence in sequences:
            text = self.texts.setdefault(sequence.seq_id, list(sequence.token_ids))
            assert text[: len(sequence.token_ids)] == list(sequence.token_ids)
            assert len(text) == len(sequence)
            start = sequence.num_computed_tokens if is_prefill else len(text) - 1
            spans.append(
                (sequence, text, start, start + (sequence.num_scheduled_tokens if is_prefill else 1))
            )
        written: set[int] = set()
        for sequence, text, start, end in spans:
            for position in range(start, end):
                slot = self.slot(sequence, position)
                assert slot not in written, "two sequences write the same slot in one step"
                written.add(slot)
                self.cache[slot] = tuple(text[: position + 1])
        answers = []
        for sequence, text, _, end in spans:
            for position in range(end):
                read = self.cache.get(self.slot(sequence, position))
                assert read == tuple(text[: position + 1]), f"position {position} reads {read}"
            answers.append(next_token(text[:end]))
            if end == len(text):
                text.append(answers[-1])
        return answers


def run_step(scheduler: Scheduler, runner: FakeRunner) -> tuple[list[Sequence], bool]:
    sequences, is_prefill = scheduler.schedule()
    scheduler.postprocess(sequences, runner.run(sequences, is_prefill))
    return sequences, is_prefill


def run_all(scheduler: Scheduler, runner: FakeRunner, limit: int = 2000) -> int:
    steps = 0
    while not scheduler.is_finished():
        run_step(scheduler, runner)
        steps += 1
        assert steps < limit, "no end in sight"
    return steps


def lengths(sequences: list[Sequence]) -> list[int]:
    return [sequence.num_scheduled_tokens for sequence in sequences]


class Load(NamedTuple):
    """What came of a load: prompt tokens computed as a share of the prompts, sequences decoded a step."""

    computed: float
    running: list[int]
    preemptions: int


def run_load(scheduler: Scheduler, sequences: list[Sequence], drawn: dict[int, int] | None = None) -> Load:
    """Only the bookkeeping, without a model. `drawn`: by seq_id, the tokens of which the last is a 9."""
    computed, running = 0, []
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.is_finished():
        scheduled, is_prefill = scheduler.schedule()
        if is_prefill:
            scheduler.block_manager.prefix_cache.prepare(scheduled)
            computed += sum(lengths(scheduled))
        else:
            running.append(len(scheduled))
        ends = [
            drawn and sequence.num_completion_tokens + 1 >= drawn[sequence.seq_id] for sequence in scheduled
        ]
        scheduler.postprocess(scheduled, [9 if end else 1 for end in ends])
    return Load(computed / sum(s.num_prompt_tokens for s in sequences), running, scheduler.num_preemptions)


def make_load(count: int, prompt: tuple[int, int], output: tuple[int, int], **options) -> list[Sequence]:
    pick = random.Random(0)
    return [
        Sequence(Request(pick.choices(range(10_000), k=pick.randint(*prompt)), params, **options))
        for params in [SamplingParams(0, pick.randint(*output), True) for _ in range(count)]
    ]


LARGE = dict(kvcache_block_size=256, max_num_seqs=512, max_num_batched_tokens=16384, max_model_len=150_000)


class SchedulerMachine(RuleBasedStateMachine):
    """
    Requests over few tokens arrive between steps; pools are small enough for preemption and many hits.

    With `overlap` a step is scheduled and computed before the tokens of the one before it are recorded, as
    the engine does on a GPU. A request is then *leaving* while its last token is on its way: it has given
    everything back. With `is_plain` there is nothing but the core.
    """

    is_plain = True

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.integers(2, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        eos=st.sampled_from([(), (EOS,), EOS, (EOS, 1)]),
        caching=st.sampled_from([True, True, True, False]),
        overlap=st.booleans(),
        is_forecast_wrong=st.booleans(),
        wait_tokens=st.sampled_from([1, 2, None]),
    )
    def start(
        self, num_blocks, block_size, max_num_seqs, budget, eos, caching, overlap, is_forecast_wrong,
        wait_tokens,
    ):  # fmt: skip
        self.set_wait_tokens(wait_tokens)
        self.is_in_order = self.is_plain or wait_tokens is None  # else some are overtaken
        self.block_size, self.max_num_seqs, self.budget = block_size, max_num_seqs, budget
        self.caching, self.overlap, self.is_forecast_wrong = caching, overlap, is_forecast_wrong
        self.eos = (eos,) if isinstance(eos, int) else eos
        self.max_model_len = num_blocks * block_size
        self.scheduler = make_scheduler(
            self.is_plain,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
            eos=eos,
            num_kvcache_blocks=num_blocks,
            kvcache_block_size=block_size,
            enable_prefix_caching=caching,
        )
        self.manager = self.scheduler.block_manager
        self.runner = FakeRunner(self.scheduler)
        self.requests: list[Sequence] = []  # unfinished, in order of arrival
        self.finished: list[Sequence] = []
        self.expected: dict[int, list[int]] = {}  # by seq_id: the completion
        self.chunked: list[Sequence] = []  # the sequence whose prompt is computed in part, if there is one
        self.under_way: tuple | None = None  # the step whose tokens are not recorded yet
        self.num_prefills = 0  # in a row, while somebody could decode

    def set_wait_tokens(self, wait_tokens: int | None) -> None:
        """For how many tokens a prompt waits that another one's step computes; None: as many as usual."""

    def admitted(self) -> list[Sequence]:
        admitted = [sequence for sequence in self.requests if sequence.block_table]
        return admitted if self.is_in_order else sorted(admitted, key=self.scheduler.running.index)

    def waiting(self) -> list[Sequence]:
        """Without blocks, and with tokens left to compute."""
        return [
            sequence
            for sequence in self.requests
            if not sequence.block_table and len(sequence) < sequence.request.max_num_tokens
        ]

    def add(self, tokens, max_tokens: int, ignore_eos: bool) -> None:
        tokens = tokens[: self.max_model_len - 1]
        sequence = make_sequence(tokens, max_tokens, ignore_eos, self.block_size)
        self.scheduler.add(sequence)
        assert sequence.status == SequenceStatus.WAITING
        assert next(reversed(self.scheduler.waiting)) is sequence
        self.requests.append(sequence)
        most = min(max_tokens, self.max_model_len - len(tokens))
        self.expected[sequence.seq_id] = expected_completion(tokens, most, () if ignore_eos else self.eos)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        max_tokens=st.integers(1, 16),
        ignore_eos=st.booleans(),
        copies=st.sampled_from([1, 1, 2, 3]),
    )
    def arrive(self, tokens, max_tokens, ignore_eos, copies):
        for _ in range(copies):
            self.add(tokens, max_tokens, ignore_eos)

    @precondition(lambda self: self.requests or self.finished)
    @rule(which=st.integers(0), extra=st.lists(st.integers(0, 3), max_size=4), max_tokens=st.integers(1, 8))
    def arrive_with_the_text_of_another(self, which, extra, max_tokens):
        """The next turn of a conversation: prompt and completion of an earlier request and a bit more."""
        everybody = [*self.requests, *self.finished]
        self.add([*everybody[which % len(everybody)].token_ids, *extra], max_tokens, True)

    @rule(excess=st.integers(0, 5), max_tokens=st.integers(1, 16))
    def arrive_too_long(self, excess, max_tokens):
        before = list(self.scheduler.waiting)
        with pytest.raises(ValueError):
            self.scheduler.add(make_sequence([1] * (self.max_model_len + excess), max_tokens))
        assert list(self.scheduler.waiting) == before

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 12))
    def steps(self, count):
        while count and self.requests:
            self.take_step()
            self.the_books_agree()
            count -= 1

    def take_step(self) -> None:
        admitted = self.admitted()
        computed = {sequence.seq_id: sequence.num_computed_tokens for sequence in admitted}
        tokens = {sequence.seq_id: list(sequence.token_ids) for sequence in self.requests}
        chunked = self.chunked
        if self.is_forecast_wrong and not self.is_plain:
            forecast_of(self.scheduler).share = 0.0
        blocked = self.scheduler.blocked
        room = self.could_admit(admitted) and self.waiting()[0] is not blocked
        victims = self.expected_victims(admitted)
        can_decode = admitted != chunked
        is_exact = self.is_forecast_exact(admitted)

        scheduled, is_prefill = self.scheduler.schedule()

        assert scheduled or self.under_way, "a step without work"
        assert len({sequence.seq_id for sequence in scheduled}) == len(scheduled)
        is_due = can_decode and self.num_prefills == MAX_PREFILLS_IN_A_ROW
        if is_exact or is_due or chunked:
            assert is_prefill == bool((room or chunked) and not is_due), "prefill first, four times in a row"
        self.num_prefills = self.num_prefills + can_decode if is_prefill else 0
        assert all(list(s.token_ids) == tokens[s.seq_id] for s in self.requests), (
            "scheduling changes no tokens"
        )
        if is_prefill:
            self.check_prefill(scheduled, admitted, computed)
        else:
            self.check_decode(scheduled, admitted, victims)
        self.the_books_agree()

        answers = self.runner.run(scheduled, is_prefill)
        in_progress = scheduled if is_prefill else [s for s in chunked if s not in victims]
        self.chunked = [s for s in in_progress if s.num_computed_tokens + s.num_scheduled_tokens < len(s)]
        if not self.overlap:
            self.record(scheduled, answers)
            return
        before, self.under_way = self.under_way, None
        if scheduled:
            self.under_way = scheduled, answers, self.scheduler.advance(scheduled)
            self.the_books_agree()
        if before:
            self.record(*before)

    def record(self, scheduled: list[Sequence], answers: list[int], *drawing) -> None:
        """The tokens of a step become known; who reached its end with them is finished, nobody else."""
        self.scheduler.postprocess(scheduled, answers, *drawing)
        for sequence in list(self.requests):
            done = len(sequence.token_ids) - sequence.num_prompt_tokens
            assert list(sequence.token_ids[-done:]) == self.expected[sequence.seq_id][:done] or done == 0
            assert sequence.is_finished == (done == len(self.expected[sequence.seq_id]))
            if sequence.is_finished:
                assert list(sequence.completion_token_ids) == self.expected[sequence.seq_id]
                assert list(sequence.block_table) == [] and len(sequence) == len(sequence.token_ids)
                self.requests.remove(sequence)
                self.finished.append(sequence)

    def could_admit(self, admitted: list[Sequence]) -> bool:
        """Whether the first waiting sequence can be given blocks, and all can run to their ends then."""
        waiting = self.waiting()
        if not waiting or len(admitted) == self.max_num_seqs or not self.can_allocate(waiting[0]):
            return False
        if self.is_plain:
            return True
        num_blocks = len(self.manager.blocks)
        at_most = sum(-(-(s.request.max_num_tokens - 1) // self.block_size) for s in [*admitted, waiting[0]])
        tables = [*(s.block_table for s in admitted), self.manager.prefix_cache.find(waiting[0]).blocks]
        held = set().union(*tables[:-1])  # each is counted once
        at_most -= sum(map(len, tables[:-1])) + len(held & set(tables[-1])) - len(held)
        return not admitted or at_most <= num_blocks or self.most_needed(admitted, waiting[0]) <= num_blocks

    def can_allocate(self, sequence: Sequence) -> bool:
        return self.manager.can_allocate(sequence, self.manager.prefix_cache.find(sequence))

    def is_forecast_exact(self, admitted: list[Sequence]) -> bool:
        """
        The forecast takes it that a table's shared blocks come first. Where two sequences have computed their
        first block at the same time and share a later one, it is off by a block or so.
        """
        shared = ([self.manager.blocks[i].ref_count > 1 for i in s.block_table] for s in admitted)
        return self.is_plain or all(counts == sorted(counts, reverse=True) for counts in shared)

    def most_needed(self, admitted: list[Sequence], new: Sequence) -> int:
        """The most blocks that are expected to be in use at once, step by step."""
        owners = {block.block_id: block.ref_count for block in self.manager.blocks}
        owners.update({i: owners[i] - 1 for i in self.manager.prefix_cache.pinned})
        hits = {i for i in self.manager.prefix_cache.find(new).blocks if owners[i]}
        kept = hits | {i for s in admitted for i in s.block_table if owners[i] > 1}
        growth = []
        for sequence in [*admitted, new]:
            is_new = sequence is new or sequence in self.chunked or sequence.num_scheduled_tokens > 0
            tokens = len(sequence) + is_new
            steps = sequence.request.max_num_tokens - tokens
            if not sequence.sampling_params.ignore_eos and self.eos:
                steps = math.ceil(steps * forecast_of(self.scheduler).share)
            if is_new:
                steps += (len(sequence) - sequence.num_computed_tokens) // self.budget
            shared = len(hits) if sequence is new else len(kept & set(sequence.block_table))
            growth.append((tokens, steps, shared))
        most = 0
        for step in range(max(steps for _, steps, _ in growth)):
            needed = len(kept)
            for tokens, steps, shared in growth:
                needed += -(-(tokens + step) // self.block_size) - shared if step < steps else 0
            most = max(most, needed)
        return most

    def expected_victims(self, admitted: list[Sequence]) -> list[Sequence]:
        """As many of the youngest as must go so that the others each get the block that they need."""
        survivors, victims = list(admitted), []
        while True:
            need = sum(len(s.block_table) * self.block_size < len(s) for s in survivors)
            held = {block_id for s in survivors for block_id in s.block_table}
            if need <= len(self.manager.blocks) - len(held):
                return victims
            victims.append(survivors.pop())

    def check_prefill(self, scheduled, admitted, computed) -> None:
        new = [sequence for sequence in scheduled if sequence not in admitted]
        old = [sequence for sequence in scheduled if sequence in admitted]
        assert sum(lengths(scheduled)) <= self.budget and min(lengths(scheduled)) >= 1
        assert len(admitted) + len(new) <= self.max_num_seqs
        still_waiting = self.waiting()
        leaving = [s for s in self.requests if s not in admitted and s not in new and s not in still_waiting]
        order = [sequence for sequence in self.requests if sequence not in leaving]
        if self.is_in_order:
            assert [*admitted, *new, *still_waiting] == order, "admission is in order of arrival"
        assert old == self.chunked, "an unfinished prompt, and no other, goes on"
        for sequence in new:
            assert sequence.num_computed_tokens == sequence.num_cached_tokens < len(sequence)
            assert self.caching or sequence.num_cached_tokens == 0
            assert len(sequence.block_table) == sequence.num_blocks
        for sequence in old:
            assert sequence.num_computed_tokens == computed[sequence.seq_id]
        for i, sequence in enumerate(scheduled):
            end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
            assert end <= len(sequence)
            if end < len(sequence):
                assert i == len(scheduled) - 1 and sum(lengths(scheduled)) == self.budget, (
                    "a chunk fills the step"
                )
        running = [*admitted, *new]
        if self.is_in_order and self.is_forecast_exact(running) and self.could_admit(running):
            # The next one would have fitted: then it must be too long for what is left of the budget.
            cached = self.cached_tokens(still_waiting[0])
            assert len(still_waiting[0]) - cached > self.budget - sum(lengths(scheduled))

    def cached_tokens(self, sequence: Sequence) -> int:
        return self.manager.prefix_cache.find(sequence).num_tokens

    def check_decode(self, scheduled, admitted, victims) -> None:
        survivors = [s for s in admitted if s not in victims and s not in self.chunked]
        assert scheduled == sorted(survivors, key=len, reverse=True), "longest first"
        assert lengths(scheduled) == [1] * len(scheduled)
        for sequence in scheduled:
            assert len(sequence.block_table) == sequence.num_blocks
        for sequence in victims:
            assert sequence.status == SequenceStatus.WAITING and list(sequence.block_table) == []
        if victims:
            front = list(self.scheduler.waiting)[: len(victims)]
            assert front == victims[::-1], "back to the front, in order"

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "scheduler"):
            return
        check_pool(self.manager, [sequence.block_table for sequence in self.requests])
        admitted, waiting = self.admitted(), self.waiting()
        in_order = list if self.is_in_order else lambda sequences: sorted(sequences, key=id)
        assert in_order(self.scheduler.waiting) == in_order(waiting)
        assert in_order(self.scheduler.running) == in_order(admitted)
        leaving = [s for s in self.requests if s not in admitted and s not in waiting]
        assert self.overlap or not leaving
        order = [sequence for sequence in self.requests if sequence not in leaving]
        assert in_order(admitted + waiting) == in_order(order), "those who run arrived first"
        assert len(admitted) <= self.max_num_seqs
        assert all(sequence.status == SequenceStatus.RUNNING for sequence in admitted)
        assert all(sequence.status == SequenceStatus.WAITING for sequence in waiting)
        assert self.scheduler.is_finished() == (not admitted and not waiting)
        for sequence in self.finished:
            assert sequence.is_finished and list(sequence.block_table) == []
            assert list(sequence.completion_token_ids) == self.expected[sequence.seq_id], (
                "changed after its end"
            )
        for sequence in admitted:
            # The last token may have no slot yet, or not be known yet: a full block may still be open then.
            closed = sum(self.manager.blocks[block_id].hash != -1 for block_id in sequence.block_table)
            assert not self.caching or closed >= (len(sequence.token_ids) - 1) // self.block_size
            check_contents(sequence, self.manager, self.block_size, closed)

    def teardown(self):
        """Every request ends, with exactly its tokens (checked by the step that ends it)."""
        self.set_wait_tokens(None)
        if not hasattr(self, "scheduler"):
            return
        limit = 50 + 8 * sum(len(s) + s.sampling_params.max_tokens for s in self.requests)
        while self.requests:
            self.take_step()
            limit -= 1
            assert limit > 0, "no end in sight"
        assert self.scheduler.is_finished()
        check_pool(self.manager, [])
