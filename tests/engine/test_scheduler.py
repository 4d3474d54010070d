"""The scheduler's rules (design.md section 3), on examples and on generated histories.

The model is a fake whose next token depends on every token before it, read through the block tables from a
fake KV cache of slots. A wrong slot, a stale block or a lost token therefore ends in a wrong read or answer.
"""

import math
import random
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_block_manager import check_contents, check_pool

from nanovllm.engine import scheduler as scheduler_module
from nanovllm.engine.forecast import Forecast
from nanovllm.engine.scheduler import MAX_PREFILLS_IN_A_ROW, WAIT_TOKENS, Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

EOS = 0


def make_scheduler(**options) -> Scheduler:
    defaults = dict(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=512,
        eos=-1,
        num_kvcache_blocks=32,
        kvcache_block_size=4,
        enable_prefix_caching=True,
        hf_config=SimpleNamespace(context_limit=200_000, tokens_in_reach=0),
    )
    return Scheduler(SimpleNamespace(**{**defaults, **options}))


def make_sequence(tokens, max_tokens: int = 8, ignore_eos: bool = False, block_size: int = 4) -> Sequence:
    return Sequence(list(tokens), SamplingParams(0.0, max_tokens, ignore_eos), block_size=block_size)


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

    def __init__(self, block_size: int):
        self.block_size = block_size
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
        for sequence in sequences:
            if sequence.block_copy is not None:
                source, target, num_tokens = sequence.block_copy
                for i in range(num_tokens):
                    self.cache[target * size + i] = self.cache[source * size + i]
            sequence.block_copy = None
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


def test_a_new_scheduler_is_finished_and_one_with_a_request_is_not():
    scheduler = make_scheduler()
    assert scheduler.is_finished()
    scheduler.add(make_sequence([1, 2, 3]))
    assert not scheduler.is_finished()


def test_prefill_goes_first_and_takes_as_many_as_the_budget_allows():
    scheduler, runner = make_scheduler(max_num_batched_tokens=16, eos=-1), FakeRunner(4)
    sequences = [make_sequence([i] * 7) for i in range(1, 4)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduled, is_prefill = scheduler.schedule()
    assert is_prefill and scheduled[:2] == sequences[:2]
    assert sum(lengths(scheduled)) <= 16
    assert all(sequence.status == SequenceStatus.RUNNING for sequence in scheduled)
    scheduler.postprocess(scheduled, runner.run(scheduled, True))
    scheduled, is_prefill = scheduler.schedule()
    assert is_prefill and scheduled == sequences[2:]
    scheduler.postprocess(scheduled, runner.run(scheduled, True))
    scheduled, is_prefill = scheduler.schedule()
    assert not is_prefill and scheduled == sequences


def test_cached_tokens_do_not_count_against_the_budget():
    scheduler, runner = make_scheduler(max_num_batched_tokens=16), FakeRunner(4)
    first = make_sequence([*range(12), 1])
    scheduler.add(first)
    run_step(scheduler, runner)
    rest = [make_sequence([*range(12), i]) for i in range(2, 6)]
    for sequence in rest:
        scheduler.add(sequence)
    scheduled, is_prefill = scheduler.schedule()
    assert is_prefill and scheduled == rest and lengths(scheduled) == [1] * 4
    assert [sequence.num_cached_tokens for sequence in rest] == [12] * 4


def test_max_num_seqs_counts_all_running_sequences():
    scheduler, runner = make_scheduler(max_num_seqs=3), FakeRunner(4)
    sequences = [make_sequence([i] * 3, max_tokens=4, ignore_eos=True) for i in range(1, 6)]
    for sequence in sequences[:2]:
        scheduler.add(sequence)
    run_step(scheduler, runner)
    for sequence in sequences[2:]:
        scheduler.add(sequence)
    scheduled, is_prefill = run_step(scheduler, runner)
    assert is_prefill and scheduled == sequences[2:3]
    scheduled, is_prefill = run_step(scheduler, runner)
    assert not is_prefill and scheduled == sequences[:3]
    run_all(scheduler, runner)
    for sequence in sequences:
        assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, 4, ())


@pytest.mark.parametrize(
    "budget, chunks", [(32, [32, 32, 32, 4]), (100, [100]), (99, [99, 1]), (7, [7] * 14 + [2])]
)
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(budget, chunks):
    scheduler, runner = make_scheduler(max_num_batched_tokens=budget), FakeRunner(4)
    sequence = make_sequence([i % 5 for i in range(100)], max_tokens=3, ignore_eos=True)
    scheduler.add(sequence)
    for i, chunk in enumerate(chunks):
        scheduled, is_prefill = scheduler.schedule()
        assert is_prefill and scheduled == [sequence]
        assert (sequence.num_computed_tokens, sequence.num_scheduled_tokens) == (sum(chunks[:i]), chunk)
        assert sequence.num_cached_tokens == 0
        scheduler.postprocess(scheduled, runner.run(scheduled, True))
        assert sequence.num_completion_tokens == (i == len(chunks) - 1), (
            "a chunk before the last has no token"
        )
    run_all(scheduler, runner)
    assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, 3, ())


def test_identical_prompts_in_one_step_share_blocks():
    scheduler, runner = make_scheduler(), FakeRunner(4)
    sequences = [make_sequence(range(10)) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduled, is_prefill = scheduler.schedule()
    assert is_prefill and scheduled == sequences
    assert lengths(scheduled) == [10, 2, 2], "whole blocks, of which nothing is computed yet"
    assert sequences[0].block_table[:2] == sequences[1].block_table[:2] == sequences[2].block_table[:2]
    scheduler.postprocess(scheduled, runner.run(scheduled, True))
    run_all(scheduler, runner)


def test_without_prefix_caching_nothing_is_shared():
    scheduler, runner = make_scheduler(enable_prefix_caching=False), FakeRunner(4)
    sequences = [make_sequence(range(10)) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
        run_step(scheduler, runner)
        assert sequence.num_cached_tokens == 0
    run_all(scheduler, runner)
    again = make_sequence(range(10))
    scheduler.add(again)
    scheduled, _ = scheduler.schedule()
    assert lengths(scheduled) == [10]


def test_the_youngest_is_preempted_and_its_answer_stays_what_it_was():
    scheduler, runner = make_scheduler(num_kvcache_blocks=4, eos=9), FakeRunner(4)
    scheduler.expected_share = 0.0  # an early end is expected, but never comes
    first = make_sequence([1] * 8, max_tokens=8)
    second = make_sequence([2] * 6, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    scheduled, is_prefill = run_step(scheduler, runner)
    assert is_prefill and scheduled == [first, second]
    scheduled, is_prefill = run_step(scheduler, runner)
    assert not is_prefill and scheduled == [first], "the first needs a third block"
    assert second.status == SequenceStatus.WAITING and second.block_table == []
    assert list(scheduler.waiting) == [second]
    assert second.num_completion_tokens == 1, "what was generated is kept"
    third = make_sequence([3], max_tokens=2)
    scheduler.add(third)
    assert list(scheduler.waiting) == [second, third]
    run_all(scheduler, runner)
    for sequence in (first, second):
        assert sequence.is_finished and sequence.status == SequenceStatus.FINISHED
        assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, 8, ())
    check_pool(scheduler.block_manager, [])


@pytest.mark.parametrize("eos", [3, (3,), (1, 3), (1, 2, 3)])
def test_any_end_of_sequence_token_ends_a_sequence_and_is_kept(eos):
    scheduler, runner = make_scheduler(eos=eos), FakeRunner(4)
    ids = (eos,) if isinstance(eos, int) else eos
    sequences = [make_sequence([i, i + 1], max_tokens=20, ignore_eos=i % 2 == 1) for i in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, runner)
    for sequence in sequences:
        ends = () if sequence.sampling_params.ignore_eos else ids
        assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, 20, ends)
    assert any(sequence.num_completion_tokens < 20 for sequence in sequences)


def test_without_an_end_of_sequence_token_only_max_tokens_ends_a_sequence():
    scheduler, runner = make_scheduler(eos=()), FakeRunner(4)
    sequences = [make_sequence([1, 2, 3], max_tokens=count) for count in (1, 2, 9)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, runner)
    assert [sequence.num_completion_tokens for sequence in sequences] == [1, 2, 9]


@pytest.mark.parametrize("prompt, max_tokens", [(20, 12), (1, 31), (31, 1)])
def test_what_fits_exactly_is_accepted_and_completed(prompt, max_tokens):
    for options in (dict(num_kvcache_blocks=8), dict(max_model_len=32)):
        scheduler, runner = make_scheduler(**options), FakeRunner(4)
        sequence = make_sequence([i % 4 for i in range(prompt)], max_tokens, ignore_eos=True)
        scheduler.add(sequence)
        run_all(scheduler, runner)
        assert sequence.num_completion_tokens == max_tokens


@pytest.mark.parametrize("prompt, max_tokens", [(20, 14), (1, 33), (31, 9), (5, None), (31, None)])
def test_a_completion_ends_at_the_latest_where_the_context_does(prompt, max_tokens):
    # The last token is never written to the cache.
    for options, longest in ((dict(num_kvcache_blocks=8), 33), (dict(max_model_len=32), 32)):
        scheduler, runner = make_scheduler(**options), FakeRunner(4)
        sequence = make_sequence([i % 4 for i in range(prompt)], max_tokens, ignore_eos=True)
        scheduler.add(sequence)
        run_all(scheduler, runner)
        assert len(sequence) == longest and sequence.finish_reason == "length"
        check_pool(scheduler.block_manager, [])


@pytest.mark.parametrize("excess", [0, 1, 20])
@pytest.mark.parametrize(
    "options, longest, message",
    [
        (
            dict(num_kvcache_blocks=8),
            33,
            "8 KV cache blocks of 4 tokens are enough for 33; raise num_kvcache",
        ),
        (dict(max_model_len=32), 32, "max_model_len is 32, which may be raised to 200000"),
        (
            dict(max_model_len=200_000, num_kvcache_blocks=60, kvcache_block_size=4096),
            200_000,
            "which is the checkpoint's own limit",
        ),
    ],
    ids=["pool", "max_model_len", "checkpoint"],
)
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_when_it_is_added(
    options, longest, message, excess
):
    scheduler, prompt = make_scheduler(**options), longest + excess
    with pytest.raises(
        ValueError, match=f"prompt has {prompt} tokens and needs room for {prompt + 1}.*{message}"
    ):
        scheduler.add(make_sequence([1] * prompt, 1))
    assert scheduler.is_finished() and not scheduler.waiting
    check_pool(scheduler.block_manager, [])
    scheduler.limits.check(longest, 0)  # a text that is only scored needs no more


def test_a_long_generation_alone_in_the_pool_never_starves():
    scheduler, runner = make_scheduler(num_kvcache_blocks=16, max_num_batched_tokens=8), FakeRunner(4)
    sequences = [make_sequence([i] * 3, max_tokens=60, ignore_eos=True) for i in range(1, 5)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, runner)
    for sequence in sequences:
        assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, 60, ())


def test_prompts_share_to_the_token_what_earlier_steps_have_computed():
    scheduler, runner = make_scheduler(kvcache_block_size=16), FakeRunner(16)
    first = make_sequence(range(100, 140), 20, True, 16)
    scheduler.add(first)
    run_step(scheduler, runner)
    rest = [make_sequence([*range(100, 100 + i), 1, 2, 3], 20, True, 16) for i in (1, 20, 39, 40, 0)]
    for sequence in rest:
        scheduler.add(sequence)
    scheduled, _ = scheduler.schedule()
    assert scheduled == rest and [sequence.num_cached_tokens for sequence in rest] == [1, 20, 39, 40, 0]
    assert scheduler.num_copied_tokens == 1 + 4 + 7 + 8
    scheduler.postprocess(scheduled, runner.run(scheduled, True))
    run_all(scheduler, runner)
    check_pool(scheduler.block_manager, [])


LONG = dict(kvcache_block_size=128, max_num_batched_tokens=512)


@pytest.mark.parametrize("num_common, waits", [(WAIT_TOKENS - 1, False), (WAIT_TOKENS, True), (128, False)])
def test_a_prompt_waits_for_a_step_that_computes_much_of_it(num_common, waits):
    """Whole blocks are shared at once."""
    scheduler, runner = make_scheduler(**LONG), FakeRunner(128)
    common = list(range(num_common))
    sequences = [make_sequence([*common, 900 + i], 4, True, 128) for i in range(3)]
    stranger = make_sequence([800], 4, True, 128)
    for sequence in [*sequences, stranger]:
        scheduler.add(sequence)
    scheduled, _ = run_step(scheduler, runner)
    assert scheduled == ([sequences[0], stranger] if waits else [*sequences, stranger])
    assert list(scheduler.waiting) == (sequences[1:] if waits else [])
    scheduled, is_prefill = run_step(scheduler, runner)
    assert is_prefill == waits
    if waits:
        assert scheduled == sequences[1:] and all(s.num_cached_tokens == num_common for s in scheduled)
    run_all(scheduler, runner)


def test_nobody_waits_twice():
    scheduler, runner = make_scheduler(**LONG), FakeRunner(128)
    first, second = (make_sequence([*range(100), i], 4, True, 128) for i in range(200, 202))
    scheduler.add(first)
    scheduler.add(second)
    assert run_step(scheduler, runner)[0] == [first] and second.has_waited
    scheduler.restart([first, second])
    scheduled, _ = scheduler.schedule()
    assert scheduled == [first, second] and second.num_scheduled_tokens == 101


def test_those_who_wait_are_left_what_they_need():
    """Blocks, rows and rule words, of which those behind them get what remains."""
    for options in (dict(num_kvcache_blocks=2), dict(max_num_seqs=2), {}):
        scheduler, runner = make_scheduler(**LONG, **options), FakeRunner(128)
        first, second = (make_sequence([*range(100), i], 20, True, 128) for i in range(200, 202))
        behind = make_sequence([300] * 100, 20, True, 128)
        if not options:
            second.num_rule_words, behind.num_rule_words = scheduler_module.RULE_WORDS, 1
        for sequence in (first, second, behind):
            scheduler.add(sequence)
        assert run_step(scheduler, runner)[0] == [first]
        assert run_step(scheduler, runner)[0] == [second]
        assert behind in scheduler.waiting
        run_all(scheduler, runner)
        assert behind.num_completion_tokens == 20


def test_a_block_that_was_only_kept_for_a_copy_lets_the_next_one_in():
    """The one behind does not fit beside it, and is looked up again when the copy has been made."""
    scheduler, runner = make_scheduler(num_kvcache_blocks=3), FakeRunner(4)
    first = make_sequence([1, 2], 2, True)
    scheduler.add(first)
    run_all(scheduler, runner)
    second, third = make_sequence([1, 2, 9], 8, True), make_sequence([5] * 3, 2, True)
    fourth = make_sequence([6] * 2, 2, True)
    for sequence in (second, third, fourth):
        scheduler.add(sequence)
    with mock.patch.object(Forecast, "admits", return_value=True):
        assert run_step(scheduler, runner)[0] == [second, third] and second.num_cached_tokens == 2
        assert run_step(scheduler, runner)[0] == [fourth]
    run_all(scheduler, runner)


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
        Sequence(pick.choices(range(10_000), k=pick.randint(*prompt)), params, **options)
        for params in [SamplingParams(0, pick.randint(*output), True) for _ in range(count)]
    ]


LARGE = dict(kvcache_block_size=256, max_num_seqs=512, max_num_batched_tokens=16384, max_model_len=150_000)


def test_in_a_small_pool_no_prompt_is_computed_twice():
    scheduler = make_scheduler(num_kvcache_blocks=200, **LARGE)
    load = run_load(scheduler, make_load(256, (100, 1024), (100, 1024), block_size=256))
    assert load.computed <= 1.05
    assert sum(load.running) / len(load.running) > 35, "no more than the pool can hold, but not far from it"


@pytest.mark.parametrize("place", [1, 20, 40, 60])
@pytest.mark.parametrize("more", [0, 1, 10, 50])
def test_a_long_prompt_waits_until_it_can_run_to_its_end(place, more):
    """In a pool in which its prompt may fit beside the others, but not what they are all going to need."""
    sequences = make_load(60, (100, 300), (200, 800), block_size=256)
    sequences.insert(place, Sequence([1] * 100_000, SamplingParams(0, 500, True), 256))
    scheduler = make_scheduler(num_kvcache_blocks=-(-100_500 // 256) + more, **LARGE)
    assert run_load(scheduler, sequences).computed <= 1.05


def test_with_room_for_everybody_all_are_admitted_at_once():
    scheduler = make_scheduler(num_kvcache_blocks=10_000, **LARGE)
    with mock.patch.object(Forecast, "_most_needed") as most_needed:
        load = run_load(scheduler, make_load(256, (100, 1024), (100, 1024), block_size=256))
    assert load.computed > 0.9999 and not most_needed.called  # some begin with the same token
    assert max(load.running) == 256 and len(load.running) <= 1024 + 1


def test_requests_that_end_early_are_expected_to():
    """They take a twentieth of their max_tokens. The pool has room for about 105 of them."""
    scheduler = make_scheduler(num_kvcache_blocks=200, eos=9, **LARGE)
    pick = random.Random(0)
    params = SamplingParams(0, 3600)
    sequences = [Sequence([pick.randrange(9999)] * pick.randint(100, 400), params, 256) for _ in range(1000)]
    load = run_load(scheduler, sequences, {seq.seq_id: pick.randint(90, 270) for seq in sequences})
    assert load.running[50] < 20
    assert min(load.running[-len(load.running) // 3 : -300]) > 80
    assert load.computed <= 1.05


@pytest.mark.parametrize("caching", [True, False])
def test_where_lengths_are_known_nobody_is_preempted(caching):
    """Also with prompts in chunks, during which others decode, shared beginnings, and several completions."""
    for seed in range(60):
        pick = random.Random(seed)
        size, num_blocks = pick.choice([2, 4, 16]), pick.randint(10, 60)
        room = size * num_blocks
        scheduler = make_scheduler(
            num_kvcache_blocks=num_blocks,
            kvcache_block_size=size,
            max_num_batched_tokens=pick.choice([size, 2 * size, room // 6 + 1, room]),
            max_num_seqs=512,
            max_model_len=room,
            enable_prefix_caching=caching,
        )
        sequences, shared = [], pick.choices(range(10), k=room // 3)
        for _ in range(pick.randint(5, 30)):
            own = pick.choices(
                range(10), k=pick.randint(*pick.choice([(1, room // 6)] * 8 + [(room // 2, room * 3 // 4)]))
            )
            prompt = pick.choice([own, (shared[: pick.randint(0, len(own))] + own)[: len(own)]])
            params = SamplingParams(0, pick.randint(1, min(room - len(prompt), room // 4)), True)
            group = [Sequence(prompt, params, size) for _ in range(pick.choice([1, 1, 1, 3]))]
            for sequence in group[1:]:
                sequence.leader = group[0]
            sequences += group
        assert run_load(scheduler, sequences).preemptions == 0, seed


def test_somebody_who_can_decode_waits_for_four_prefill_steps_at_most():
    """One prompt of a whole step arrives with every step."""
    scheduler, runner = make_scheduler(max_num_batched_tokens=16, num_kvcache_blocks=100), FakeRunner(4)
    first = make_sequence([1, 2, 3], max_tokens=12, ignore_eos=True)
    scheduler.add(first)
    kinds = []
    while not first.is_finished:
        scheduler.add(make_sequence([len(kinds)] * 15, max_tokens=1))
        _, is_prefill = run_step(scheduler, runner)
        kinds.append(is_prefill)
    row = [True] * MAX_PREFILLS_IN_A_ROW
    assert kinds == [True] + [*row, False] * 11 and MAX_PREFILLS_IN_A_ROW == 4


def test_others_decode_between_the_chunks_of_a_prompt():
    scheduler, runner = make_scheduler(max_num_batched_tokens=8, num_kvcache_blocks=100), FakeRunner(4)
    first, long = make_sequence([1, 2, 3], 6, True), make_sequence([2] * 75, 4, True)
    scheduler.add(first)
    run_step(scheduler, runner)
    scheduler.add(long)
    steps = []
    while long.num_completion_tokens == 0:
        steps.append((*run_step(scheduler, runner), long.num_computed_tokens))
    assert [is_prefill for _, is_prefill, _ in steps] == [*[True] * 4, False] * 2 + [True] * 2
    assert all(scheduled == ([long] if is_prefill else [first]) for scheduled, is_prefill, _ in steps)
    assert [computed for *_, computed in steps] == [8, 16, 24, 32, 32, 40, 48, 56, 64, 64, 72, 75]
    run_all(scheduler, runner)
    for sequence, count in ((first, 6), (long, 4)):
        assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, count, ())


def test_a_prompt_may_be_preempted_between_its_chunks():
    scheduler, runner = make_scheduler(max_num_batched_tokens=4, num_kvcache_blocks=9), FakeRunner(4)
    first, long = make_sequence([1, 2, 3, 4], 16), make_sequence([2] * 32, 4)
    scheduler.add(first)
    run_step(scheduler, runner)
    scheduler.add(long)
    with mock.patch.object(Forecast, "admits", return_value=True):
        assert run_step(scheduler, runner)[0] == [long]
    while long.status == SequenceStatus.RUNNING:
        run_step(scheduler, runner)
    assert scheduler.chunked is None and list(scheduler.waiting) == [long] and not long.block_table
    assert scheduler.block_manager.find_prefix(long).blocks, "what was computed can be found again"
    run_all(scheduler, runner)  # the runner sees whether a block is found that was never computed
    for sequence, count in ((first, 16), (long, 4)):
        assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, count, ())


def test_a_prompt_without_room_is_looked_up_once_until_blocks_are_given_back():
    scheduler = make_scheduler(num_kvcache_blocks=10)
    first, second = make_sequence([1] * 9, 20, True), make_sequence([2] * 5, 4, True)
    blocked, behind = make_sequence([3] * 20, 12, True), make_sequence([4], 1)
    for sequence in (first, second, blocked, behind):
        scheduler.add(sequence)
    find, looked_up = scheduler.block_manager.find_prefix, []
    with mock.patch.object(
        scheduler.block_manager, "find_prefix", lambda seq: (looked_up.append(seq), find(seq))[1]
    ):
        while not second.is_finished:
            assert not scheduler.is_finished()
            scheduled, _ = scheduler.schedule()
            scheduler.postprocess(scheduled, [1] * len(scheduled))
        assert looked_up == [first, second, blocked], "each once, and nobody behind the one without room"
        while not scheduler.is_finished():
            scheduled, _ = scheduler.schedule()
            scheduler.postprocess(scheduled, [1] * len(scheduled))
    assert looked_up == [first, second, blocked, blocked, blocked, behind], "once more for each release"


def test_when_the_one_without_room_is_aborted_the_next_gets_its_turn():
    scheduler = make_scheduler(num_kvcache_blocks=10)
    first, blocked, behind = (
        make_sequence([1] * 9, 20, True),
        make_sequence([3] * 30, 4),
        make_sequence([4], 1),
    )
    for sequence in (first, blocked, behind):
        scheduler.add(sequence)
    for _ in range(2):
        scheduled, _ = scheduler.schedule()
        scheduler.postprocess(scheduled, [1] * len(scheduled))
    assert list(scheduler.waiting) == [blocked, behind]
    scheduler.end(blocked, "abort")
    assert scheduler.schedule() == ([behind], True)


class SchedulerMachine(RuleBasedStateMachine):
    """
    Requests over few tokens arrive between steps; pools are small enough for preemption and many hits.

    With `overlap` a step is scheduled and computed before the tokens of the one before it are recorded, as
    the engine does on a GPU. A request is then *leaving* while its last token is on its way: it has given
    everything back.
    """

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.integers(2, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        eos=st.sampled_from([(), (EOS,), EOS, (EOS, 1)]),
        caching=st.sampled_from([True, True, True, False]),
        overlap=st.booleans(),
        is_forecast_wrong=st.booleans(),
        wait_tokens=st.sampled_from([1, 2, WAIT_TOKENS]),
    )
    def start(
        self, num_blocks, block_size, max_num_seqs, budget, eos, caching, overlap, is_forecast_wrong,
        wait_tokens,
    ):  # fmt: skip
        scheduler_module.WAIT_TOKENS = wait_tokens
        self.is_in_order = wait_tokens == WAIT_TOKENS  # else some wait while those behind them are admitted
        self.block_size, self.max_num_seqs, self.budget = block_size, max_num_seqs, budget
        self.caching, self.overlap, self.is_forecast_wrong = caching, overlap, is_forecast_wrong
        self.eos = (eos,) if isinstance(eos, int) else eos
        self.max_model_len = num_blocks * block_size
        self.scheduler = make_scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
            eos=eos,
            num_kvcache_blocks=num_blocks,
            kvcache_block_size=block_size,
            enable_prefix_caching=caching,
        )
        self.manager = self.scheduler.block_manager
        self.runner = FakeRunner(block_size)
        self.requests: list[Sequence] = []  # unfinished, in order of arrival
        self.finished: list[Sequence] = []
        self.expected: dict[int, list[int]] = {}  # by seq_id: the completion
        self.chunked: list[Sequence] = []  # the sequence whose prompt is computed in part, if there is one
        self.under_way: tuple | None = None  # the step whose tokens are not recorded yet
        self.num_prefills = 0  # in a row, while somebody could decode

    def admitted(self) -> list[Sequence]:
        admitted = [sequence for sequence in self.requests if sequence.block_table]
        return admitted if self.is_in_order else sorted(admitted, key=self.scheduler.running.index)

    def waiting(self) -> list[Sequence]:
        """Without blocks, and with tokens left to compute."""
        return [
            sequence
            for sequence in self.requests
            if not sequence.block_table and len(sequence) < sequence.max_num_tokens
        ]

    def add(self, tokens, max_tokens: int, ignore_eos: bool) -> None:
        tokens = tokens[: self.max_model_len - 1]
        sequence = make_sequence(tokens, max_tokens, ignore_eos, self.block_size)
        self.scheduler.add(sequence)
        assert sequence.status == SequenceStatus.WAITING
        assert self.scheduler.waiting[-1] is sequence
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
        if self.is_forecast_wrong:
            self.scheduler.expected_share = 0.0
        blocked = self.scheduler.blocked
        room = self.could_admit(admitted) and self.waiting()[0] is not blocked
        victims = self.expected_victims(admitted)
        can_decode = admitted != chunked

        scheduled, is_prefill = self.scheduler.schedule()

        assert scheduled or self.under_way, "a step without work"
        assert len({sequence.seq_id for sequence in scheduled}) == len(scheduled)
        is_due = can_decode and self.num_prefills == MAX_PREFILLS_IN_A_ROW
        assert is_prefill == bool((room or chunked) and not is_due), "prefill goes first, four times in a row"
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
        if not waiting or len(admitted) == self.max_num_seqs or not self.manager.can_allocate(waiting[0]):
            return False
        num_blocks = len(self.manager.blocks)
        at_most = sum(-(-(s.max_num_tokens - 1) // self.block_size) for s in [*admitted, waiting[0]])
        tables = [*(s.block_table for s in admitted), self.manager.find_prefix(waiting[0]).blocks]
        held = set().union(*tables[:-1])  # each is counted once
        at_most -= sum(map(len, tables[:-1])) + len(held & set(tables[-1])) - len(held)
        return not admitted or at_most <= num_blocks or self.most_needed(admitted, waiting[0]) <= num_blocks

    def most_needed(self, admitted: list[Sequence], new: Sequence) -> int:
        """The most blocks that are expected to be in use at once, step by step."""
        owners = {block.block_id: block.ref_count for block in self.manager.blocks}
        owners.update({i: owners[i] - 1 for i in self.manager.pinned})
        hits = {i for i in self.manager.find_prefix(new).blocks if owners[i]}
        kept = hits | {i for s in admitted for i in s.block_table if owners[i] > 1}
        growth = []
        for sequence in [*admitted, new]:
            is_new = sequence is new or sequence in self.chunked or sequence.num_scheduled_tokens > 0
            tokens = len(sequence) + is_new
            steps = sequence.max_num_tokens - tokens
            if not sequence.sampling_params.ignore_eos and self.eos:
                steps = math.ceil(steps * self.scheduler.expected_share)
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
        if self.is_in_order and self.could_admit([*admitted, *new]):
            # The next one would have fitted: then it must be too long for what is left of the budget.
            cached = self.cached_tokens(still_waiting[0])
            assert len(still_waiting[0]) - cached > self.budget - sum(lengths(scheduled))

    def cached_tokens(self, sequence: Sequence) -> int:
        match = self.manager.find_prefix(sequence)
        return len(match.blocks) * self.block_size + match.num_copied

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
        scheduler_module.WAIT_TOKENS = WAIT_TOKENS
        if not hasattr(self, "scheduler"):
            return
        limit = 50 + 8 * sum(len(s) + s.sampling_params.max_tokens for s in self.requests)
        while self.requests:
            self.take_step()
            limit -= 1
            assert limit > 0, "no end in sight"
        assert self.scheduler.is_finished()
        check_pool(self.manager, [])


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerHistories = SchedulerMachine.TestCase


def test_blocks_that_no_layer_reads_again_go_back_to_the_pool():
    """With a window of 9 tokens and blocks of 4 a sequence keeps 3 or 4 blocks, however long it becomes."""
    scheduler = make_scheduler(
        num_kvcache_blocks=16, hf_config=SimpleNamespace(context_limit=200_000, tokens_in_reach=9)
    )
    manager = scheduler.block_manager
    seq = make_sequence(range(10, 30), max_tokens=40, ignore_eos=True)
    scheduler.add(seq)
    seen = []
    while not scheduler.is_finished():
        sequences, _ = scheduler.schedule()
        first = max(0, seq.num_computed_tokens + 1 - 9)
        own = seq.block_table[seq.num_released_blocks :]
        assert seq.num_released_blocks * 4 <= first, "a block that this step reads was given back"
        assert set(own) == manager.used_block_ids
        seen.append(len(own))
        scheduler.postprocess(sequences, [1])
    assert seen[0] == 5 and set(seen[1:]) == {3}
    assert not manager.used_block_ids and len(manager.free_block_ids) == 16
    again = make_sequence(range(10, 30))
    assert len(manager.find_prefix(again).blocks) == 4, "until it is handed out, a block can be found"


def test_a_block_goes_back_only_when_all_its_tokens_are_known():
    scheduler = make_scheduler(hf_config=SimpleNamespace(context_limit=200_000, tokens_in_reach=1))
    seq = make_sequence([1, 2, 3], max_tokens=9, ignore_eos=True)
    scheduler.add(seq)
    before, _ = scheduler.schedule()
    scheduler.advance(before)
    for token_id in (4, 5):  # each step begins before the token of the one before it is known
        assert seq.num_released_blocks == 0
        sequences, _ = scheduler.schedule()
        drawing = scheduler.advance(sequences)
        assert seq.num_released_blocks * 4 <= len(seq.token_ids)
        scheduler.postprocess(before, [token_id], drawing)
        before = sequences
    assert seq.num_released_blocks == 1
    assert len(scheduler.block_manager.find_prefix(make_sequence([1, 2, 3, 4, 6])).blocks) == 1


def test_a_block_that_is_shared_stays_used_when_one_of_its_sequences_has_left_it_behind():
    scheduler = make_scheduler(hf_config=SimpleNamespace(context_limit=200_000, tokens_in_reach=4))
    first, second = make_sequence([*range(16)], 30, True), make_sequence([*range(12), 99], 30, True)
    scheduler.add(first)
    scheduler.postprocess(scheduler.schedule()[0], [1])
    beginning = first.block_table[:3]
    scheduler.add(second)
    sequences, is_prefill = scheduler.schedule()
    assert is_prefill and second.block_table[:3] == beginning and first.num_released_blocks == 3
    assert [scheduler.block_manager.blocks[i].ref_count for i in beginning] == [1, 1, 1]
    scheduler.postprocess(sequences, [1])
    assert [scheduler.block_manager.blocks[i].ref_count for i in beginning] == [0, 0, 1]
    scheduler.preempt(scheduler.running.pop())
    assert not second.block_table and second.num_released_blocks == 0
    check_pool(scheduler.block_manager, [first.block_table[first.num_released_blocks :]])
