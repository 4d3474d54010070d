"""Admission control: who runs to its end without a preemption, and who is kept back after a failure."""

import random
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from scheduling import (
    LARGE,
    SchedulerMachine,
    forecast_of,
    make_engine,
    make_load,
    make_scheduler,
    make_sequence,
    run_all,
    run_load,
)

from nanovllm.engine.sequence import Request, Sequence
from nanovllm.extensions.prefixes import token_prefixes
from nanovllm.extensions.prefixes.token_prefixes import WAIT_TOKENS
from nanovllm.extensions.safety.admission import AdmissionControl
from nanovllm.sampling_params import SamplingParams


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
    sequences.insert(place, Sequence(Request([1] * 100_000, SamplingParams(0, 500, True), 256)))
    scheduler = make_scheduler(num_kvcache_blocks=-(-100_500 // 256) + more, **LARGE)
    assert run_load(scheduler, sequences).computed <= 1.05


def test_with_room_for_everybody_all_are_admitted_at_once():
    scheduler = make_scheduler(num_kvcache_blocks=10_000, **LARGE)
    with mock.patch.object(AdmissionControl, "_most_needed") as most_needed:
        load = run_load(scheduler, make_load(256, (100, 1024), (100, 1024), block_size=256))
    assert load.computed > 0.9999 and not most_needed.called  # some begin with the same token
    assert max(load.running) == 256 and len(load.running) <= 1024 + 1


def test_requests_that_end_early_are_expected_to():
    """They take a twentieth of their max_tokens. The pool has room for about 105 of them."""
    scheduler = make_scheduler(num_kvcache_blocks=200, eos=9, **LARGE)
    pick = random.Random(0)
    params = SamplingParams(0, 3600)
    prompts = [[pick.randrange(9999)] * pick.randint(100, 400) for _ in range(1000)]
    sequences = [Sequence(Request(prompt, params, 256)) for prompt in prompts]
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
            count = pick.choice([1, 1, 1, 3])
            sequences += [Sequence(Request(prompt, params, size)) for _ in range(count)]
        assert run_load(scheduler, sequences).preemptions == 0, seed


def test_a_prompt_without_room_is_looked_up_once_until_blocks_are_given_back():
    scheduler = make_scheduler(num_kvcache_blocks=10)
    first, second = make_sequence([1] * 9, 20, True), make_sequence([2] * 5, 4, True)
    blocked, behind = make_sequence([3] * 20, 12, True), make_sequence([4], 1)
    for sequence in (first, second, blocked, behind):
        scheduler.add(sequence)
    prefix_cache, looked_up = scheduler.block_manager.prefix_cache, []
    find = prefix_cache.find
    with mock.patch.object(prefix_cache, "find", lambda seq: (looked_up.append(seq), find(seq))[1]):
        while not second.is_finished:
            assert not scheduler.is_finished()
            scheduled, _ = scheduler.schedule()
            scheduler.postprocess(scheduled, [1] * len(scheduled))
        tries = [blocked, blocked]  # beside those that are admitted, and in the step behind that one
        assert looked_up == [first, second, *tries], "and nobody behind the one without room"
        while not scheduler.is_finished():
            scheduled, _ = scheduler.schedule()
            scheduler.postprocess(scheduled, [1] * len(scheduled))
    assert looked_up == [first, second, *tries, blocked, blocked, behind], "once more for each release"


def test_after_a_culprit_one_more_may_run_with_each_that_ends_though_others_keep_coming():
    scheduler, most = make_scheduler(num_kvcache_blocks=100), []
    admission = forecast_of(scheduler)
    admission.max_running = 2  # as recovery.py leaves it
    for number in range(40):
        while len(scheduler.waiting) < 9:
            scheduler.add(make_sequence([number, len(scheduler.waiting)], 3, True))
        limit = admission.max_running
        scheduled, _ = scheduler.schedule()
        most.append(len(scheduler.running))
        finished = scheduler.postprocess(scheduled, [1] * len(scheduled))
        assert most[-1] <= limit and admission.max_running == min(8, limit + len(finished))
    assert max(most[:3]) == 2 and max(most[-9:]) == 8


def test_the_expected_share_is_that_of_completions_that_could_have_ended_early():
    scheduler, runner = make_engine(eos=9)
    sequences = [make_sequence([i, 1], 8) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, runner)
    assert forecast_of(scheduler).share == 1.0, "all have drawn all that they could"
    sequences = [make_sequence([1, 2], 8), make_sequence([3, 4], 8), make_sequence([5, 6], 4, True)]
    for sequence in sequences:
        scheduler.add(sequence)
    for token_id in (1, 1, 1, 9):
        scheduled, _ = scheduler.schedule()
        scheduler.postprocess(scheduled, [token_id if seq is sequences[0] else 1 for seq in scheduled])
    scheduler.end(sequences[1], "abort")
    assert [seq.finish_reason for seq in sequences] == ["stop", "abort", "length"]
    # In its middle, after 2 of the 4 tokens that it drew, it had 6 left, and drew 2 of these.
    assert forecast_of(scheduler).share == pytest.approx(1 + (2 / 6 - 1) / 32)


class ExtendedMachine(SchedulerMachine):
    is_plain = False

    def set_wait_tokens(self, wait_tokens: int | None) -> None:
        token_prefixes.WAIT_TOKENS = wait_tokens or WAIT_TOKENS


ExtendedMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerHistories = ExtendedMachine.TestCase
