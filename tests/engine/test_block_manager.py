"""The rules of the paged cache's bookkeeping (design.md section 3), on examples and on generated histories.

`Pool` is a second, slow bookkeeping of the same pool, written from the rules alone: what every block holds,
who refers to it and in which order free blocks go out. The state machine compares the two after every step.
"""

import time

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_index import PrefixIndex, num_common_bytes
from nanovllm.engine.sequence import Sequence, pack

BLOCK_SIZE = 256


def published_hash(token_ids: list[int], prefix: int = -1) -> int:
    """The hash as design.md words it, so that a change of it is noticed."""
    digest = xxhash.xxh64()
    if prefix != -1:
        digest.update(prefix.to_bytes(8, "little"))
    digest.update(np.asarray(token_ids, dtype="<i8").tobytes())
    return digest.intdigest()


def compute(manager: BlockManager, *sequences: Sequence) -> None:
    """As a step would that computes all their tokens."""
    for sequence in sequences:
        start, sequence.num_computed_tokens = sequence.num_computed_tokens, len(sequence)
        manager.note_computed(sequence, start)
        sequence.block_copy = None
    manager.end_copies()


def make_sequence(token_ids, block_size: int = BLOCK_SIZE) -> Sequence:
    return Sequence(list(token_ids), block_size=block_size)


def check_pool(manager: BlockManager, tables: list[list[int]]) -> None:
    """What holds at any time, given the block tables of everybody that has blocks."""
    free, used = list(manager.free_block_ids), set(manager.used_block_ids)
    assert len(free) == len(set(free)) == len(manager.free_block_ids)
    assert not used & set(free)
    assert used | set(free) == set(range(len(manager.blocks)))
    free = set(free)
    references = [int(block_id in manager.pinned) for block_id in range(len(manager.blocks))]
    for table in tables:
        assert len(set(table)) == len(table)
        for block_id in table:
            references[block_id] += 1
    for block_id, block in enumerate(manager.blocks):
        assert block.block_id == block_id
        assert block.ref_count == references[block_id]
        assert (block.ref_count == 0) == (block_id in free)
        owners = block.ref_count - (block_id in manager.pinned)
        assert owners <= 1 or block.hash != -1, "an open block is shared"
    assert len(manager.hash_to_block_id) <= len(manager.blocks), "entries of blocks handed out pile up"


def check_contents(sequence: Sequence, manager: BlockManager, block_size: int, closed: int) -> None:
    """The first `closed` blocks of a sequence are full, hash-chained and hold its tokens; others are open."""
    prefix = -1
    for i, block_id in enumerate(sequence.block_table):
        block = manager.blocks[block_id]
        if i < closed:
            token_ids = list(sequence.token_ids[i * block_size : (i + 1) * block_size])
            prefix = published_hash(token_ids, prefix)
            assert block.hash == prefix
            assert list(block.token_ids) == token_ids
        else:
            assert block.hash == -1
            assert block.ref_count == 1
            assert sequence.token_ids[i * block_size :][: len(block.token_ids)] == block.token_ids


def test_the_hash_is_xxh64_of_the_previous_hash_and_the_tokens():
    first = BlockManager.compute_hash([1, 2, 3])
    assert (
        first == published_hash([1, 2, 3]) == xxhash.xxh64(np.array([1, 2, 3], "<i8").tobytes()).intdigest()
    )
    second = BlockManager.compute_hash([1, 2, 3], first)
    assert second == published_hash([1, 2, 3], first) != first


def test_the_example_of_the_design_holds():
    manager = BlockManager(10, BLOCK_SIZE)
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
    manager = BlockManager(10, 16)
    first, second = make_sequence(range(16 * blocks), 16), make_sequence(range(16 * blocks), 16)
    manager.allocate(first)
    manager.allocate(second)
    assert second.num_cached_tokens == 16 * (blocks - 1)
    assert second.block_table[:-1] == first.block_table[:-1]
    assert second.block_table[-1] != first.block_table[-1]


def test_equal_blocks_after_different_prefixes_do_not_match():
    manager = BlockManager(10, 4)
    first = make_sequence([1, 1, 1, 1, 7, 7, 7, 7, 0], 4)
    second = make_sequence([2, 2, 2, 2, 7, 7, 7, 7, 0], 4)
    manager.allocate(first)
    manager.allocate(second)
    assert second.num_cached_tokens == 0
    assert not set(first.block_table) & set(second.block_table)


def test_after_the_first_miss_everything_misses():
    """The third block could still be found by its chained hash, but the second could not."""
    manager = BlockManager(10, 4)
    tokens = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 9]
    first, second = make_sequence(tokens, 4), make_sequence(tokens, 4)
    manager.allocate(first)
    del manager.hash_to_block_id[manager.blocks[first.block_table[1]].hash]
    manager.allocate(second)
    assert second.num_cached_tokens == 4
    assert set(second.block_table) & set(first.block_table) == {first.block_table[0]}


def test_what_two_prompts_share_of_a_block_is_copied():
    manager = BlockManager(10, 4)
    first, second = make_sequence(range(10), 4), make_sequence([0, 1, 2, 3, 4, 5, 6, 99], 4)
    manager.allocate(first)
    match = manager.find_prefix(second)
    assert match == ([first.block_table[0]], -1, 0, 3), "nothing that is not computed yet is copied"
    compute(manager, first)
    manager.allocate(second)
    assert second.num_cached_tokens == second.num_computed_tokens == 7
    assert second.block_copy == (first.block_table[1], second.block_table[1], 3)
    assert second.block_table[0] == first.block_table[0]
    compute(manager, second)
    third = make_sequence([0, 1, 2, 3, 4, 5, 6, 99, 5], 4)
    manager.allocate(third)
    assert third.num_cached_tokens == 8 and third.block_copy is None


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_the_same_prompt_again_computes_its_last_token_only(length):
    manager = BlockManager(10, 4)
    first, second = make_sequence(range(length), 4), make_sequence(range(length), 4)
    manager.allocate(first)
    compute(manager, first)
    manager.allocate(second)
    assert second.num_cached_tokens == length - 1
    manager.deallocate(first)
    compute(manager, second)
    check_pool(manager, [second.block_table])


def test_a_sequence_that_ends_leaves_its_open_block_to_be_copied_from():
    manager = BlockManager(10, 4)
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
    manager = BlockManager(3, 4)
    first, second = make_sequence([1, 2, 3, 4], 4), make_sequence([1, 2, 3, 9, 9], 4)
    manager.allocate(first)
    compute(manager, first)
    (source,) = first.block_table
    manager.deallocate(first)
    manager.allocate(second)
    assert second.block_copy.source == source and source not in second.block_table
    assert not manager.can_allocate(make_sequence([7], 4))
    check_pool(manager, [second.block_table])
    assert manager.end_copies()
    assert manager.can_allocate(make_sequence([7], 4))
    check_pool(manager, [second.block_table])


def test_where_keeping_the_source_would_leave_too_few_blocks_nothing_is_copied():
    manager = BlockManager(2, 4)
    first, second = make_sequence([1, 2, 3, 4], 4), make_sequence([1, 2, 3, 9, 9], 4)
    manager.allocate(first)
    compute(manager, first)
    manager.deallocate(first)
    assert manager.can_allocate(second)
    manager.allocate(second)
    assert second.num_cached_tokens == 0 and second.block_copy is None


def test_of_two_equal_blocks_one_stays_findable_when_the_other_is_handed_out():
    manager = BlockManager(4, 4)
    first, second = make_sequence([1, 2, 3, 4], 4), make_sequence([1, 2, 3, 4], 4)
    manager.allocate(first)
    manager.allocate(second)
    compute(manager, first, second)
    manager.deallocate(second)
    manager.allocate(make_sequence(range(10, 21), 4))
    third = make_sequence([1, 2, 3, 4, 5], 4)
    assert manager.find_prefix(third).blocks == first.block_table


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(10, 4, enable_prefix_caching=False)
    first = make_sequence(range(10), 4)
    manager.allocate(first)
    compute(manager, first)
    assert manager.find_prefix(make_sequence(range(10), 4)) == ([], -1, 0, 0)
    manager.deallocate(first)
    assert manager.find_prefix(make_sequence(range(10), 4)) == ([], -1, 0, 0)


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


some_tokens = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), max_size=6)


@given(st.lists(st.tuples(st.integers(-1, 1), some_tokens.filter(len)), max_size=40), st.data())
def test_the_index_finds_what_looking_at_every_block_finds(blocks, data):
    index, left = PrefixIndex(), dict(enumerate(blocks))
    for block_id in data.draw(st.permutations(range(len(blocks)))):
        index.add(block_id, blocks[block_id][0], pack(blocks[block_id][1]))
    for block_id in data.draw(st.lists(st.integers(0, 40))):  # some of them more than once, or never there
        index.remove(block_id)
        left.pop(block_id, None)
    for parent, wanted in data.draw(st.lists(st.tuples(st.integers(-1, 1), some_tokens), min_size=1)):
        there = {i: num_common(tokens, wanted) for i, (p, tokens) in left.items() if p == parent}
        block_id, found = index.longest(parent, pack(wanted))
        assert found == max(there.values(), default=0)
        assert there[block_id] == found if found else block_id == -1
        assert index.longest(parent, pack(wanted), found)[1] == found
        assert index.longest(parent, pack(wanted), found + 1) == (-1, found + 1)
        assert not found or index.longest(parent, pack(wanted), found - 1) == (block_id, found)


@given(st.binary(), st.binary(), st.binary())
def test_common_bytes_are_counted(common, a, b):
    a, b = common + a, common + b
    assert num_common_bytes(a, b) == num_common(a, b)


def test_a_hash_collision_is_not_a_hit(monkeypatch):
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix=-1: 42))
    manager = BlockManager(10, 4)
    first, second = make_sequence([1, 1, 1, 1, 0], 4), make_sequence([2, 2, 2, 2, 0], 4)
    manager.allocate(first)
    manager.allocate(second)
    assert second.num_cached_tokens == 0
    assert not set(first.block_table) & set(second.block_table)


def test_freed_blocks_stay_findable_until_they_are_handed_out():
    manager = BlockManager(4, 4)
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
    manager = BlockManager(6, 4)
    first, second = make_sequence(range(9), 4), make_sequence(range(50, 59), 4)
    manager.allocate(first)
    manager.allocate(second)
    tables = list(first.block_table), list(second.block_table)
    manager.deallocate(second)
    manager.deallocate(first)
    assert list(manager.free_block_ids) == tables[1][::-1] + tables[0][::-1]


def test_admission_counts_only_blocks_that_are_really_new():
    manager = BlockManager(4, 4)
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
    manager = BlockManager(4, 4)
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
    manager = BlockManager(3, 4)
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
    manager = BlockManager(2, 4)
    first, second = make_sequence([1, 2, 3], 4), make_sequence([5, 6, 7, 8], 4)
    manager.allocate(first)
    manager.allocate(second)
    first.append_token(4)
    assert manager.can_append(first)
    second.append_token(9)
    assert not manager.can_append(second)


@pytest.mark.parametrize(
    "length, blocks, last", [(1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 1), (32, 2, 16)]
)
def test_a_sequence_counts_its_blocks(length, blocks, last):
    sequence = make_sequence(range(length), 16)
    assert (sequence.num_blocks, sequence.last_block_num_tokens) == (blocks, last)
    assert [token for i in range(blocks) for token in sequence.block(i)] == list(range(length))


def test_a_sequence_tells_its_prompt_from_its_completion():
    tokens = [5, 6, 7]
    sequence = make_sequence(tokens, 16)
    sequence.append_token(8)
    sequence.append_token(9)
    assert tokens == [5, 6, 7], "the caller's list is not the sequence's"
    assert len(sequence) == sequence.num_tokens == 5 and sequence.num_prompt_tokens == 3
    assert list(sequence.prompt_token_ids) == [5, 6, 7] and list(sequence.completion_token_ids) == [8, 9]
    assert sequence.num_completion_tokens == 2 and sequence.last_token == sequence[4] == 9
    assert not sequence.is_finished
    assert make_sequence([1]).seq_id != sequence.seq_id


def seconds_for_a_history(num_blocks: int) -> float:
    """The best of some repetitions of the same operations: new blocks, shared ones, free ones found again."""
    manager = BlockManager(num_blocks, 16)
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


class Pool:
    """What the rules say about a pool, kept with plain lists and searches."""

    def __init__(self, num_blocks: int, block_size: int, free: list[int]):
        self.block_size = block_size
        self.free = list(free)  # in the order in which blocks will be handed out
        self.references = [0] * num_blocks
        # The whole text up to the end of the block, for closed blocks; None while open or never written.
        self.text: list[tuple[int, ...] | None] = [None] * num_blocks
        # The whole text up to what of the block is computed and can be copied.
        self.computed: list[tuple[int, ...]] = [()] * num_blocks
        self.handed_out: set[int] = set()  # by the last operation

    def prefix(self, tokens: list[int], i: int) -> tuple[int, ...]:
        return tuple(tokens[: (i + 1) * self.block_size])

    def num_hits(self, tokens: list[int]) -> int:
        """How many whole blocks of this prompt can be found."""
        most = (len(tokens) - 1) // self.block_size
        return next((i for i in range(most) if self.prefix(tokens, i) not in self.text), most)

    def num_copied(self, tokens: list[int], start: int) -> int:
        """How many tokens from this one on some block has, behind the same ones."""
        most = 0
        for text in self.computed:
            if start < len(text) <= start + self.block_size:
                most = max(most, num_common(text, tokens[:-1]) - start)
        return most

    def new_blocks(self, tokens: list[int], hits: list[int]) -> int:
        """How many free blocks an allocation takes that finds `hits`."""
        total = -(-len(tokens) // self.block_size)
        return total - sum(self.references[block_id] > 0 for block_id in hits)

    def hand_out(self) -> int:
        block_id = self.free.pop(0)
        self.handed_out.add(block_id)
        self.text[block_id], self.computed[block_id] = None, ()
        self.references[block_id] = 1
        return block_id

    def allocate(self, tokens: list[int], hits: list[int], source: int) -> list[int]:
        for i, block_id in enumerate(hits):
            assert self.text[block_id] == self.prefix(tokens, i), (
                f"block {block_id} does not hold what it was hit for"
            )
            if self.references[block_id] == 0:
                self.free.remove(block_id)
            self.references[block_id] += 1
        if source in self.free:
            self.free.remove(source)  # until the copy is made
            self.references[source] = 1
        table = list(hits)
        for i in range(len(hits), -(-len(tokens) // self.block_size)):
            table.append(self.hand_out())
            if (i + 1) * self.block_size <= len(tokens):
                self.text[table[-1]] = self.prefix(tokens, i)
        return table

    def compute(self, tokens: list[int], table: list[int]) -> None:
        for i, block_id in enumerate(table):
            self.computed[block_id] = self.prefix(tokens, i)

    def append(self, tokens: list[int], table: list[int]) -> None:
        if len(tokens) % self.block_size == 1:
            table.append(self.hand_out())
        elif len(tokens) % self.block_size == 0:
            self.text[table[-1]] = self.computed[table[-1]] = tuple(tokens)

    def free_table(self, tokens: list[int], table: list[int]) -> None:
        """The tokens are those that are computed."""
        if len(tokens) % self.block_size:
            self.computed[table[len(tokens) // self.block_size]] = tuple(tokens)
        for block_id in reversed(table):
            self.give_back(block_id)

    def give_back(self, block_id: int) -> None:
        self.references[block_id] -= 1
        if self.references[block_id] == 0:
            self.free.append(block_id)


class BlockManagerMachine(RuleBasedStateMachine):
    """
    Sequences over two tokens come, grow, go and come back; texts repeat often, pools are small. Those that
    come are computed by a step when one that was there is to grow or to go, or before.
    """

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(2, 6))
    def start(self, num_blocks, block_size):
        self.block_size = block_size
        self.manager = BlockManager(num_blocks, block_size)
        self.pool = Pool(num_blocks, block_size, list(self.manager.free_block_ids))
        assert sorted(self.pool.free) == list(range(num_blocks))
        self.findable: dict[int, int] = {}  # hash_to_block_id after the operation before
        self.live: list[Sequence] = []
        self.tables: list[list[int]] = []
        self.new: list[Sequence] = []  # of the live ones, those that are not computed yet
        self.gone: list[Sequence] = []

    def admit(self, sequence: Sequence) -> bool:
        tokens = list(sequence.token_ids)
        match = self.manager.find_prefix(sequence)
        start = len(match.blocks) * self.block_size
        assert len(match.blocks) == self.pool.num_hits(tokens)
        num_new, num_free = self.pool.new_blocks(tokens, match.blocks), len(self.pool.free)
        if match.num_copied == 0 and num_new >= num_free:
            assert match.source == -1, "no room to keep the source"
        else:
            assert match.num_copied == self.pool.num_copied(tokens, start)
        fits = self.manager.can_allocate(sequence)
        assert bool(fits) == (num_new <= num_free)
        if not fits:
            return False
        if match.num_copied:
            read = self.pool.computed[match.source][: start + match.num_copied]
            assert read == tuple(tokens[: start + match.num_copied])
        self.manager.allocate(sequence)
        assert sequence.num_cached_tokens == start + match.num_copied < len(tokens)
        assert sequence.num_cached_blocks == len(match.blocks)
        table = self.pool.allocate(tokens, match.blocks, match.source)
        assert list(sequence.block_table) == table
        copy = (match.source, table[len(match.blocks)], match.num_copied) if match.num_copied else None
        assert sequence.block_copy == copy
        self.live.append(sequence)
        self.tables.append(table)
        self.new.append(sequence)
        return True

    @rule()
    def compute(self):
        for block_id in self.manager.pinned:
            self.pool.give_back(block_id)
        compute(self.manager, *self.new)
        for sequence in self.new:
            self.pool.compute(list(sequence.token_ids), self.tables[self.live.index(sequence)])
        self.new = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def arrive(self, tokens):
        self.admit(make_sequence(tokens, self.block_size))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0), extra=st.lists(st.integers(0, 1), max_size=3))
    def arrive_alike(self, which, extra):
        """A prompt that begins like a live sequence, or is the same."""
        self.admit(make_sequence([*self.live[which % len(self.live)].token_ids, *extra], self.block_size))

    @precondition(lambda self: self.gone)
    @rule(which=st.integers(0))
    def come_back(self, which):
        """A preempted sequence, the same object, with the tokens that it had."""
        sequence = self.gone.pop(which % len(self.gone))
        if not self.admit(sequence):
            self.gone.append(sequence)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, which, tokens):
        self.compute()
        which %= len(self.live)
        sequence, table = self.live[which], self.tables[which]
        for token in tokens:
            sequence.append_token(token)
            needed = len(sequence) % self.block_size == 1
            assert bool(self.manager.can_append(sequence)) == (len(self.pool.free) >= needed)
            if not self.manager.can_append(sequence):
                self.leave(which)  # preempted with a last token that has no block
                return
            self.manager.may_append(sequence)
            self.pool.append(list(sequence.token_ids), table)
            sequence.num_computed_tokens = len(sequence)
            assert list(sequence.block_table) == table

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0))
    def go(self, which):
        self.compute()
        self.leave(which % len(self.live))

    def leave(self, which: int) -> None:
        sequence = self.live.pop(which)
        self.pool.free_table(sequence.token_ids[: sequence.num_computed_tokens], self.tables.pop(which))
        self.manager.deallocate(sequence)
        assert list(sequence.block_table) == []
        self.gone = [*self.gone[-3:], sequence]

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "manager"):
            return
        check_pool(self.manager, self.tables)
        assert list(self.manager.free_block_ids) == self.pool.free
        for sequence, table in zip(self.live, self.tables, strict=True):
            assert list(sequence.block_table) == table
            check_contents(sequence, self.manager, self.block_size, len(sequence) // self.block_size)
        for block_hash, block_id in self.findable.items():
            assert block_hash in self.manager.hash_to_block_id or block_id in self.pool.handed_out
        self.findable = dict(self.manager.hash_to_block_id)
        self.pool.handed_out.clear()


BlockManagerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestBlockManagerHistories = BlockManagerMachine.TestCase
