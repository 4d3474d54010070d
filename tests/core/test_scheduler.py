"""The scheduler's rules (design.md section 3), on examples and on generated histories."""

import pytest
from block_pool import check_pool
from hypothesis import HealthCheck, settings
from scheduling import (
    FakeRunner,
    SchedulerMachine,
    expected_completion,
    lengths,
    make_engine,
    make_scheduler,
    make_sequence,
    run_all,
    run_step,
)

from nanovllm.engine.scheduler import MAX_PREFILLS_IN_A_ROW, Scheduler
from nanovllm.engine.sequence import SequenceStatus


def make_plain(**options) -> Scheduler:
    return make_scheduler(is_plain=True, **options)


def make_plain_engine(**options) -> tuple[Scheduler, FakeRunner]:
    return make_engine(is_plain=True, **options)


def test_a_new_scheduler_is_finished_and_one_with_a_request_is_not():
    scheduler = make_plain()
    assert scheduler.is_finished()
    scheduler.add(make_sequence([1, 2, 3]))
    assert not scheduler.is_finished()


def test_prefill_goes_first_and_takes_as_many_as_the_budget_allows():
    scheduler, runner = make_plain_engine(max_num_batched_tokens=16, eos=-1)
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
    scheduler, runner = make_plain_engine(max_num_batched_tokens=16)
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
    scheduler, runner = make_plain_engine(max_num_seqs=3)
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
    scheduler, runner = make_plain_engine(max_num_batched_tokens=budget)
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
    scheduler, runner = make_plain_engine()
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
    scheduler, runner = make_plain_engine(enable_prefix_caching=False)
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
    scheduler, runner = make_plain_engine(num_kvcache_blocks=4, eos=9)
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
    scheduler, runner = make_plain_engine(eos=eos)
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
    scheduler, runner = make_plain_engine(eos=())
    sequences = [make_sequence([1, 2, 3], max_tokens=count) for count in (1, 2, 9)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, runner)
    assert [sequence.num_completion_tokens for sequence in sequences] == [1, 2, 9]


@pytest.mark.parametrize("prompt, max_tokens", [(20, 12), (1, 31), (31, 1)])
def test_what_fits_exactly_is_accepted_and_completed(prompt, max_tokens):
    for options in (dict(num_kvcache_blocks=8), dict(max_model_len=32)):
        scheduler, runner = make_plain_engine(**options)
        sequence = make_sequence([i % 4 for i in range(prompt)], max_tokens, ignore_eos=True)
        scheduler.add(sequence)
        run_all(scheduler, runner)
        assert sequence.num_completion_tokens == max_tokens


@pytest.mark.parametrize("prompt, max_tokens", [(20, 14), (1, 33), (31, 9), (5, None), (31, None)])
def test_a_completion_ends_at_the_latest_where_the_context_does(prompt, max_tokens):
    # The last token is never written to the cache.
    for options, longest in ((dict(num_kvcache_blocks=8), 33), (dict(max_model_len=32), 32)):
        scheduler, runner = make_plain_engine(**options)
        sequence = make_sequence([i % 4 for i in range(prompt)], max_tokens, ignore_eos=True)
        scheduler.add(sequence)
        run_all(scheduler, runner)
        assert len(sequence) == longest and sequence.finish_reason == "length"
        check_pool(scheduler.block_manager, [])


def test_a_long_generation_alone_in_the_pool_never_starves():
    scheduler, runner = make_plain_engine(num_kvcache_blocks=16, max_num_batched_tokens=8)
    sequences = [make_sequence([i] * 3, max_tokens=60, ignore_eos=True) for i in range(1, 5)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, runner)
    for sequence in sequences:
        assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, 60, ())


def test_somebody_who_can_decode_waits_for_four_prefill_steps_at_most():
    """One prompt of a whole step arrives with every step."""
    scheduler, runner = make_plain_engine(max_num_batched_tokens=16, num_kvcache_blocks=100)
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
    scheduler, runner = make_plain_engine(max_num_batched_tokens=8, num_kvcache_blocks=100)
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
    scheduler, runner = make_plain_engine(max_num_batched_tokens=4, num_kvcache_blocks=9)
    first, long = make_sequence([1, 2, 3, 4], 16), make_sequence([2] * 32, 4)
    scheduler.add(first)
    run_step(scheduler, runner)
    scheduler.add(long)
    assert run_step(scheduler, runner)[0] == [long]
    while long.status == SequenceStatus.RUNNING:
        run_step(scheduler, runner)
    assert scheduler.chunked is None and list(scheduler.waiting) == [long] and not long.block_table
    assert scheduler.block_manager.prefix_cache.find(long).blocks, "what was computed can be found again"
    run_all(scheduler, runner)  # the runner sees whether a block is found that was never computed
    for sequence, count in ((first, 16), (long, 4)):
        assert sequence.completion_token_ids == expected_completion(sequence.prompt_token_ids, count, ())


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerHistories = SchedulerMachine.TestCase
