"""Prompts that could copy from one another: who waits for whom, and what those who wait are left."""

from unittest import mock

import pytest
from block_pool import check_pool
from scheduling import give_rules, hold_back_of, make_engine, make_sequence, run_all, run_step

from nanovllm.extensions.logits.bias import RULE_WORDS
from nanovllm.extensions.prefixes.token_prefixes import WAIT_TOKENS
from nanovllm.extensions.safety.admission import AdmissionControl


def test_prompts_share_to_the_token_what_earlier_steps_have_computed():
    scheduler, runner = make_engine(kvcache_block_size=16)
    first = make_sequence(range(100, 140), 20, True, 16)
    scheduler.add(first)
    run_step(scheduler, runner)
    rest = [make_sequence([*range(100, 100 + i), 1, 2, 3], 20, True, 16) for i in (1, 20, 39, 40, 0)]
    for sequence in rest:
        scheduler.add(sequence)
    scheduled, _ = scheduler.schedule()
    assert scheduled == rest and [sequence.num_cached_tokens for sequence in rest] == [1, 20, 39, 40, 0]
    assert scheduler.block_manager.prefix_cache.num_copied_tokens == 1 + 4 + 7 + 8
    scheduler.postprocess(scheduled, runner.run(scheduled, True))
    run_all(scheduler, runner)
    check_pool(scheduler.block_manager, [])


LONG = dict(kvcache_block_size=128, max_num_batched_tokens=512)


@pytest.mark.parametrize("num_common, waits", [(WAIT_TOKENS - 1, False), (WAIT_TOKENS, True), (128, False)])
def test_a_prompt_waits_for_a_step_that_computes_much_of_it(num_common, waits):
    """Whole blocks are shared at once."""
    scheduler, runner = make_engine(**LONG)
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


def test_blocks_that_one_who_waits_is_going_to_share_are_counted_once():
    """All three fit the pool, but would not if the one that waits needed its own blocks for all of it."""
    scheduler, runner = make_engine(**LONG, num_kvcache_blocks=6)
    common = list(range(256 + WAIT_TOKENS))
    first = make_sequence([*common, 900], 2, True, 128)  # three blocks, and ends soon
    second = make_sequence(
        [*common, *[901] * (470 - len(common))], 40, True, 128
    )  # four, of which two are shared
    stranger = make_sequence([800] * 100, 40, True, 128)  # one, and two in the end
    for sequence in (first, second, stranger):
        scheduler.add(sequence)
    assert run_step(scheduler, runner)[0] == [first, stranger] and [*scheduler.waiting] == [second]
    assert run_step(scheduler, runner)[0] == [second]
    run_all(scheduler, runner)
    assert scheduler.num_preemptions == 0


def test_nobody_waits_twice():
    scheduler, runner = make_engine(**LONG)
    first, second = (make_sequence([*range(100), i], 4, True, 128) for i in range(200, 202))
    scheduler.add(first)
    scheduler.add(second)
    assert run_step(scheduler, runner)[0] == [first] and second in hold_back_of(scheduler).have_waited
    scheduler.clear([first, second])
    scheduled, _ = scheduler.schedule()
    assert scheduled == [first, second] and second.num_scheduled_tokens == 101


def test_those_who_wait_are_left_what_they_need():
    """Blocks, rows and rule words, of which those behind them get what remains."""
    for options in (dict(num_kvcache_blocks=2), dict(max_num_seqs=2), {}):
        scheduler, runner = make_engine(**LONG, **options)
        first, second = (make_sequence([*range(100), i], 20, True, 128) for i in range(200, 202))
        behind = make_sequence([300] * 100, 20, True, 128)
        if not options:
            give_rules(second, RULE_WORDS)
            give_rules(behind, 1)
        for sequence in (first, second, behind):
            scheduler.add(sequence)
        assert run_step(scheduler, runner)[0] == [first]
        assert run_step(scheduler, runner)[0] == [second]
        assert behind in scheduler.waiting
        run_all(scheduler, runner)
        assert behind.num_completion_tokens == 20


def test_a_block_that_was_only_kept_for_a_copy_lets_the_next_one_in():
    """The one behind does not fit beside it, and is looked up again when the copy has been made."""
    scheduler, runner = make_engine(num_kvcache_blocks=3)
    first = make_sequence([1, 2], 2, True)
    scheduler.add(first)
    run_all(scheduler, runner)
    second, third = make_sequence([1, 2, 9], 8, True), make_sequence([5] * 3, 2, True)
    fourth = make_sequence([6] * 2, 2, True)
    for sequence in (second, third, fourth):
        scheduler.add(sequence)
    with mock.patch.object(AdmissionControl, "_most_needed", return_value=0):
        assert run_step(scheduler, runner)[0] == [second, third] and second.num_cached_tokens == 2
        assert run_step(scheduler, runner)[0] == [fourth]
    run_all(scheduler, runner)
