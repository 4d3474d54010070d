"""The rules of the paged cache's books (design.md section 3), on examples and on generated histories."""

import time

import block_pool
import numpy as np
import pytest
import xxhash
from block_pool import BLOCK_SIZE, Manager, check_pool, compute, make_sequence, published_hash
from hypothesis import HealthCheck, settings

from nanovllm.engine.block_manager import Hit


def test_the_hash_is_xxh64_of_the_previous_hash_and_the_tokens():
    first = Manager.compute_hash([1, 2, 3])
    assert (
        first == published_hash([1, 2, 3]) == xxhash.xxh64(np.array([1, 2, 3], "<i8").tobytes()).intdigest()
    )
    second = Manager.compute_hash([1, 2, 3], first)
    assert second == published_hash([1, 2, 3], first) != first


def test_the_example_of_the_design_holds():
    manager = Manager(10, BLOCK_SIZE)
    first = make_sequence(range(600))
    manager.allocate(first)
    assert first.num_cached_tokens == 0
    a, b, c = first.block_table
    second = make_sequence([*range(512), *range(1000, 1008)])
    manager.allocate(second)
    assert second.num_cached_tokens == 512
    assert second.block_table[:2] == [a, b]
    assert second.block_table[2] not in (a, b, c)
    assert [manager.blocks[i].ref_count for i in (a, b, c)] == [2, 2, 1]
    check_pool(manager, [first.block_table, second.block_table])


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_hit_leaves_at_least_one_token_to_compute(blocks):
    manager = Manager(10, 16)
    first, second = make_sequence(range(16 * blocks), 16), make_sequence(range(16 * blocks), 16)
    manager.allocate(first)
    manager.allocate(second)
    assert second.num_cached_tokens == 16 * (blocks - 1)
    assert second.block_table[:-1] == first.block_table[:-1]
    assert second.block_table[-1] != first.block_table[-1]


def test_equal_blocks_after_different_prefixes_do_not_match():
    manager = Manager(10, 4)
    first = make_sequence([1, 1, 1, 1, 7, 7, 7, 7, 0], 4)
    second = make_sequence([2, 2, 2, 2, 7, 7, 7, 7, 0], 4)
    manager.allocate(first)
    manager.allocate(second)
    assert second.num_cached_tokens == 0
    assert not set(first.block_table) & set(second.block_table)


def test_after_the_first_miss_everything_misses():
    """The third block could still be found by its chained hash, but the second could not."""
    manager = Manager(10, 4)
    tokens = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 9]
    first, second = make_sequence(tokens, 4), make_sequence(tokens, 4)
    manager.allocate(first)
    del manager.hash_to_block_id[manager.blocks[first.block_table[1]].hash]
    manager.allocate(second)
    assert second.num_cached_tokens == 4
    assert set(second.block_table) & set(first.block_table) == {first.block_table[0]}


def test_without_prefix_caching_nothing_is_found():
    manager = Manager(10, 4, enable_prefix_caching=False)
    first = make_sequence(range(10), 4)
    manager.allocate(first)
    compute(manager, first)
    assert manager.prefix_cache.find(make_sequence(range(10), 4)) == Hit([], 0)
    manager.deallocate(first)
    assert manager.prefix_cache.find(make_sequence(range(10), 4)) == Hit([], 0)


def test_a_hash_collision_is_not_a_hit(monkeypatch):
    monkeypatch.setattr(Manager, "compute_hash", staticmethod(lambda token_ids, prefix=-1: 42))
    manager = Manager(10, 4)
    first, second = make_sequence([1, 1, 1, 1, 0], 4), make_sequence([2, 2, 2, 2, 0], 4)
    manager.allocate(first)
    manager.allocate(second)
    assert second.num_cached_tokens == 0
    assert not set(first.block_table) & set(second.block_table)


def test_freed_blocks_stay_findable_until_they_are_handed_out():
    manager = Manager(4, 4)
    first = make_sequence([1, 1, 1, 1, 2, 2, 2, 2, 0], 4)
    manager.allocate(first)
    table = list(first.block_table)
    manager.deallocate(first)
    assert first.block_table == []
    again = make_sequence([1, 1, 1, 1, 2, 2, 2, 2, 5], 4)
    manager.allocate(again)
    assert again.num_cached_tokens == 8 and again.block_table[:2] == table[:2]
    manager.deallocate(again)
    flood = make_sequence(range(100, 116), 4)
    manager.allocate(flood)
    manager.deallocate(flood)
    last = make_sequence([1, 1, 1, 1, 2, 2, 2, 2, 5], 4)
    manager.allocate(last)
    assert last.num_cached_tokens == 0


def test_least_recently_freed_goes_first_and_a_sequence_is_freed_last_to_first():
    manager = Manager(6, 4)
    first, second = make_sequence(range(9), 4), make_sequence(range(50, 59), 4)
    manager.allocate(first)
    manager.allocate(second)
    tables = list(first.block_table), list(second.block_table)
    manager.deallocate(second)
    manager.deallocate(first)
    assert list(manager.free_block_ids) == tables[1][::-1] + tables[0][::-1]


def test_admission_counts_only_blocks_that_are_really_new():
    manager = Manager(4, 4)
    first = make_sequence([*range(12), 99], 4)
    manager.allocate(first)
    assert len(manager.free_block_ids) == 0
    assert not manager.can_allocate(make_sequence([1], 4))
    manager.deallocate(first)
    holder = make_sequence([*range(8), 99], 4)
    manager.allocate(holder)  # two hits and one new block: one left
    assert len(manager.free_block_ids) == 1
    assert manager.can_allocate(make_sequence([*range(8), 98], 4))  # hits on used blocks cost nothing
    # The third block is a hit on a free block, which costs one, and a fourth is new: two of one.
    assert not manager.can_allocate(make_sequence([*range(12), 98], 4))
    assert not manager.can_allocate(make_sequence([50] * 5, 4))


def test_can_allocate_changes_nothing():
    manager = Manager(4, 4)
    first = make_sequence(range(9), 4)
    manager.allocate(first)
    manager.deallocate(first)
    before = list(manager.free_block_ids), dict(manager.hash_to_block_id)
    probe = make_sequence(range(9), 4)
    for _ in range(3):
        assert manager.can_allocate(probe)
    assert (list(manager.free_block_ids), dict(manager.hash_to_block_id)) == before
    assert probe.block_table == [] and probe.num_cached_tokens == 0


def test_appending_opens_a_block_after_a_full_one_and_closes_the_block_that_it_fills():
    manager = Manager(3, 4)
    sequence = make_sequence([1, 2, 3], 4)
    manager.allocate(sequence)
    assert len(sequence.block_table) == 1 and manager.blocks[sequence.block_table[0]].hash == -1
    sequence.append_token(4)
    assert manager.can_append(sequence)
    manager.may_append(sequence)
    block = manager.blocks[sequence.block_table[0]]
    assert block.hash == published_hash([1, 2, 3, 4]) and list(block.token_ids) == [1, 2, 3, 4]
    assert len(sequence.block_table) == 1
    sequence.append_token(5)
    assert manager.can_append(sequence)
    manager.may_append(sequence)
    assert len(sequence.block_table) == 2 and manager.blocks[sequence.block_table[1]].hash == -1
    for token in (6, 7, 8):
        sequence.append_token(token)
        manager.may_append(sequence)
    assert manager.blocks[sequence.block_table[1]].hash == published_hash([5, 6, 7, 8], block.hash)
    other = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    manager.allocate(other)
    assert other.num_cached_tokens == 8, "blocks that generation filled can be shared too"


def test_appending_needs_a_free_block_only_when_a_block_is_opened():
    manager = Manager(2, 4)
    first, second = make_sequence([1, 2, 3], 4), make_sequence([5, 6, 7, 8], 4)
    manager.allocate(first)
    manager.allocate(second)
    first.append_token(4)
    assert manager.can_append(first)
    second.append_token(9)
    assert not manager.can_append(second)


def seconds_for_a_history(num_blocks: int) -> float:
    """The best of some repetitions of the same operations: new blocks, shared ones, free ones found again."""
    manager = Manager(num_blocks, 16)
    best = float("inf")
    for repetition in range(5):
        histories = [[i * 100 + repetition * 100_000 + j // 16 for j in range(100)] for i in range(20)]
        start = time.perf_counter()
        for tokens in histories * 2:  # the second time hits blocks at the far end of the free list
            first, second = make_sequence(tokens, 16), make_sequence(tokens, 16)
            for sequence in (first, second):
                assert manager.can_allocate(sequence)
                manager.allocate(sequence)
                for token in range(20):
                    sequence.append_token(token)
                    assert manager.can_append(sequence)
                    manager.may_append(sequence)
            manager.deallocate(first)
            manager.deallocate(second)
        best = min(best, time.perf_counter() - start)
    return best


def test_operations_do_not_grow_with_the_pool():
    small, large = seconds_for_a_history(1_000), seconds_for_a_history(500_000)
    assert large < 10 * small + 0.01, f"{small:.4f} s with 1,000 blocks, {large:.4f} s with 500,000"


block_pool.BlockManagerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestBlockManagerHistories = block_pool.BlockManagerMachine.TestCase
