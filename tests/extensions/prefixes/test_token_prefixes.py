"""Prompts share cached tokens to the token: the rules, on examples and on generated histories."""

import pytest
from block_pool import (
    BlockManagerMachine,
    Manager,
    check_pool,
    compute,
    copy_for,
    make_sequence,
    num_common,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.extensions.prefixes.token_prefixes import COMPUTED, TokenHit, TokenPrefixes, count_common, pack


def make_manager(num_blocks: int) -> Manager:
    """With blocks of 4 tokens."""
    return Manager(num_blocks, 4, prefix_cache=TokenPrefixes())


def test_what_two_prompts_share_of_a_block_is_copied():
    manager = make_manager(10)
    first, second = make_sequence(range(10), 4), make_sequence([0, 1, 2, 3, 4, 5, 6, 99], 4)
    manager.allocate(first)
    hit = manager.prefix_cache.find(second)
    assert hit == TokenHit([first.block_table[0]], 4, num_soon=7), "what is not computed is not copied"
    compute(manager, first)
    manager.allocate(second)
    assert second.num_cached_tokens == second.num_computed_tokens == 7
    assert copy_for(manager, second) == (first.block_table[1], second.block_table[1], 3)
    assert second.block_table[0] == first.block_table[0]
    compute(manager, second)
    third = make_sequence([0, 1, 2, 3, 4, 5, 6, 99, 5], 4)
    manager.allocate(third)
    assert third.num_cached_tokens == 8 and copy_for(manager, third) is None


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_the_same_prompt_again_computes_its_last_token_only(length):
    manager = make_manager(10)
    first, second = make_sequence(range(length), 4), make_sequence(range(length), 4)
    manager.allocate(first)
    compute(manager, first)
    manager.allocate(second)
    assert second.num_cached_tokens == length - 1
    manager.deallocate(first)
    compute(manager, second)
    check_pool(manager, [second.block_table])


def test_a_sequence_that_ends_leaves_its_open_block_to_be_copied_from():
    manager = make_manager(10)
    first = make_sequence([1, 2], 4)
    manager.allocate(first)
    compute(manager, first)
    first.append_token(3)  # is never computed
    manager.deallocate(first)
    second = make_sequence([1, 2, 3, 4], 4)
    manager.allocate(second)
    assert second.num_cached_tokens == 2
    compute(manager, second)
    check_pool(manager, [second.block_table])


def test_a_free_block_that_is_copied_from_is_not_handed_out_before_the_copy_is_made():
    manager = make_manager(3)
    first, second = make_sequence([1, 2, 3, 4], 4), make_sequence([1, 2, 3, 9, 9], 4)
    manager.allocate(first)
    compute(manager, first)
    (source,) = first.block_table
    manager.deallocate(first)
    manager.allocate(second)
    assert copy_for(manager, second)[0] == source and source not in second.block_table
    assert not manager.can_allocate(make_sequence([7], 4))
    check_pool(manager, [second.block_table])
    compute(manager, second)
    assert not manager.prefix_cache.pinned
    assert manager.can_allocate(make_sequence([7], 4))
    check_pool(manager, [second.block_table])


def test_where_keeping_the_source_would_leave_too_few_blocks_nothing_is_copied():
    manager = make_manager(2)
    first, second = make_sequence([1, 2, 3, 4], 4), make_sequence([1, 2, 3, 9, 9], 4)
    manager.allocate(first)
    compute(manager, first)
    manager.deallocate(first)
    assert manager.can_allocate(second)
    manager.allocate(second)
    assert second.num_cached_tokens == 0 and copy_for(manager, second) is None


def test_of_two_equal_blocks_one_stays_findable_when_the_other_is_handed_out():
    manager = make_manager(4)
    first, second = make_sequence([1, 2, 3, 4], 4), make_sequence([1, 2, 3, 4], 4)
    manager.allocate(first)
    manager.allocate(second)
    compute(manager, first, second)
    manager.deallocate(second)
    manager.allocate(make_sequence(range(10, 21), 4))
    third = make_sequence([1, 2, 3, 4, 5], 4)
    assert manager.prefix_cache.find(third).blocks == first.block_table


def add(index: TokenPrefixes, block_id: int, parent: int, token_ids: list[int]) -> None:
    """To what can be copied from; `parent` stands for the tokens before."""
    seq = make_sequence([7, 7, 7, 7, *token_ids], 4)
    seq.block_table, seq.block_hashes = [-1, block_id], [parent]
    index.add(seq, 1, COMPUTED, len(seq))


some_tokens = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), max_size=6)


@given(st.lists(st.tuples(st.integers(-1, 1), some_tokens.filter(len)), max_size=40), st.data())
def test_the_index_finds_what_looking_at_every_block_finds(blocks, data):
    index, left = make_manager(1).prefix_cache, dict(enumerate(blocks))
    for block_id in data.draw(st.permutations(range(len(blocks)))):
        add(index, block_id, *blocks[block_id])
    for block_id in data.draw(st.lists(st.integers(0, 40))):  # some of them more than once, or never there
        index.forgotten(block_id)
        left.pop(block_id, None)
    for parent, wanted in data.draw(st.lists(st.tuples(st.integers(-1, 1), some_tokens), min_size=1)):
        there = {i: num_common(tokens, wanted) for i, (p, tokens) in left.items() if p == parent}
        block_id, found = index.longest((parent, COMPUTED), pack(wanted))
        assert found == max(there.values(), default=0)
        assert there[block_id] == found if found else block_id == -1


TOKENS = st.lists(st.sampled_from([0, 1, 256, 65537, 2**31 - 1]))  # of which some have bytes in common


@given(TOKENS, TOKENS, TOKENS)
def test_common_tokens_are_counted(common, a, b):
    a, b = common + a, common + b
    assert count_common(pack(a), pack(b)) == num_common(a, b)


def test_an_index_from_which_all_has_been_removed_is_empty():
    index = make_manager(1).prefix_cache
    for block_id in range(6):
        add(index, block_id, block_id % 3, [block_id])
    for block_id in range(6):
        index.forgotten(block_id)
    assert not index.blocks and not index.children


class TokenPrefixesMachine(BlockManagerMachine):
    prefix_cache = TokenPrefixes


TokenPrefixesMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestTokenPrefixesHistories = TokenPrefixesMachine.TestCase
