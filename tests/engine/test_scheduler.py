"""The scheduler beyond tests/core: what it says of prompts without room, and requests that are aborted."""

import time

import pytest
from block_pool import check_pool
from scheduling import make_scheduler, make_sequence


def make_plain(**options):
    return make_scheduler(is_plain=True, **options)


@pytest.mark.parametrize("excess", [0, 1, 20])
@pytest.mark.parametrize(
    "options, longest, message",
    [
        (
            dict(num_kvcache_blocks=8),
            33,
            "8 KV cache blocks of 4 tokens are enough for 33; raise num_kvcache",
        ),
        (dict(max_model_len=32), 32, "max_model_len is 32, and the checkpoint's own limit 200000"),
        (
            dict(max_model_len=200_000, num_kvcache_blocks=60, kvcache_block_size=4096),
            200_000,
            "max_model_len is 200000, and the checkpoint's own limit 200000",
        ),
    ],
    ids=["pool", "max_model_len", "checkpoint"],
)
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_when_it_is_added(
    options, longest, message, excess
):
    scheduler, prompt = make_plain(**options), longest + excess
    with pytest.raises(
        ValueError, match=f"prompt has {prompt} tokens and needs room for {prompt + 1}.*{message}"
    ):
        scheduler.add(make_sequence([1] * prompt, 1))
    assert scheduler.is_finished() and not scheduler.waiting
    check_pool(scheduler.block_manager, [])
    scheduler.prompts.check_length(longest, 0, "prompt")  # a text that is only scored needs no more


def test_when_the_one_without_room_is_aborted_the_next_gets_its_turn():
    scheduler = make_plain(num_kvcache_blocks=10)
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


def test_waiting_requests_are_aborted_as_quickly_wherever_they_stand():
    scheduler = make_plain()
    sequences = [make_sequence([1, 2]) for _ in range(10_000)]
    for sequence in sequences:
        scheduler.add(sequence)
    start = time.perf_counter()
    for sequence in [*sequences[5_000:][::-1], *sequences[:5_000]]:
        scheduler.end(sequence, "abort")
    assert time.perf_counter() - start < 1 and scheduler.is_finished()
