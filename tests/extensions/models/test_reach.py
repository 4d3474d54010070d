"""Blocks that no layer of a model with a window reads again, as the core's scheduler gives them back."""

from types import SimpleNamespace

from block_pool import check_pool
from scheduling import make_scheduler, make_sequence


def make_plain(**options):
    return make_scheduler(is_plain=True, **options)


def test_blocks_that_a_window_has_left_behind_admit_a_waiting_request_at_once():
    window = SimpleNamespace(context_limit=200_000, tokens_in_reach=17, vocab_size=100)
    scheduler = make_plain(num_kvcache_blocks=6, hf_config=window)
    first, second = make_sequence(range(19), 9, True), make_sequence([1] * 7, 4, True)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.schedule() == ([first], True)
    scheduler.postprocess([first], [1])
    assert scheduler.schedule() == ([first], False) and scheduler.blocked is second
    scheduler.postprocess([first], [1])
    assert scheduler.schedule() == ([second], True)


def test_a_block_goes_back_only_when_all_its_tokens_are_known():
    scheduler = make_plain(
        hf_config=SimpleNamespace(context_limit=200_000, tokens_in_reach=1, vocab_size=100)
    )
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
    assert len(scheduler.block_manager.prefix_cache.find(make_sequence([1, 2, 3, 4, 6])).blocks) == 1


def test_a_block_that_is_shared_stays_used_when_one_of_its_sequences_has_left_it_behind():
    scheduler = make_plain(
        hf_config=SimpleNamespace(context_limit=200_000, tokens_in_reach=4, vocab_size=100)
    )
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
    scheduler.preempt(scheduler.running[-1])
    assert not second.block_table and second.num_released_blocks == 0
    check_pool(scheduler.block_manager, [first.block_table[first.num_released_blocks :]])


def test_blocks_that_no_layer_reads_again_go_back_to_the_pool():
    """With a window of 9 tokens and blocks of 4 a sequence keeps 3 or 4 blocks, however long it becomes."""
    scheduler = make_plain(
        num_kvcache_blocks=16,
        hf_config=SimpleNamespace(context_limit=200_000, tokens_in_reach=9, vocab_size=100),
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
    assert len(manager.prefix_cache.find(again).blocks) == 4, "until it is handed out, a block can be found"
