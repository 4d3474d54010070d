"""The books of a pool of blocks, checked: what always holds, and a second, slow bookkeeping beside it.

`Pool` is written from the rules alone (design.md section 3): what every block holds, who refers to it and in
which order free blocks go out. The state machine compares the two after every step.
"""

import numpy as np
import xxhash
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.engine.block_manager import BlockManager, Hit, PrefixCache
from nanovllm.engine.sequence import Request, Sequence

BLOCK_SIZE = 256


def published_hash(token_ids: list[int], prefix: int = -1) -> int:
    """The hash as design.md words it, so that a change of it is noticed."""
    digest = xxhash.xxh64()
    if prefix != -1:
        digest.update(prefix.to_bytes(8, "little"))
    digest.update(np.asarray(token_ids, dtype="<i8").tobytes())
    return digest.intdigest()


class Manager(BlockManager):
    """Looks up what the cache has of a sequence, where the scheduler would."""

    def can_allocate(self, seq: Sequence, hit: Hit | None = None) -> bool:
        return super().can_allocate(seq, hit or self.prefix_cache.find(seq))

    def allocate(self, seq: Sequence, hit: Hit | None = None) -> None:
        super().allocate(seq, hit or self.prefix_cache.find(seq))


def compute(manager: BlockManager, *sequences: Sequence) -> None:
    """As a step would that computes all their tokens."""
    for sequence in sequences:
        sequence.num_scheduled_tokens = len(sequence) - sequence.num_computed_tokens
    manager.prefix_cache.prepare(list(sequences))
    for sequence in sequences:
        sequence.num_computed_tokens, sequence.num_scheduled_tokens = len(sequence), 0


def make_sequence(token_ids, block_size: int = BLOCK_SIZE) -> Sequence:
    return Sequence(Request(list(token_ids), block_size=block_size))


def check_pool(manager: BlockManager, tables: list[list[int]]) -> None:
    """What holds at any time, given the block tables of everybody that has blocks."""
    free, used = list(manager.free_block_ids), set(manager.used_block_ids)
    assert len(free) == len(set(free)) == len(manager.free_block_ids)
    assert not used & set(free)
    assert used | set(free) == set(range(len(manager.blocks)))
    free = set(free)
    references = [int(block_id in manager.prefix_cache.pinned) for block_id in range(len(manager.blocks))]
    for table in tables:
        assert len(set(table)) == len(table)
        for block_id in table:
            references[block_id] += 1
    for block_id, block in enumerate(manager.blocks):
        assert block.block_id == block_id
        assert block.ref_count == references[block_id]
        assert (block.ref_count == 0) == (block_id in free)
        owners = block.ref_count - (block_id in manager.prefix_cache.pinned)
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
            assert not block.token_ids


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def copy_for(manager: BlockManager, sequence: Sequence) -> tuple[int, ...] | None:
    """From which block to which, and how many tokens, before the sequence's first step."""
    copies = getattr(manager.prefix_cache, "copies", ())
    target = sequence.block_table[sequence.num_cached_blocks]
    return next((copy for copy in copies if copy[1] == target), None)


class Pool:
    """What the rules say about a pool, kept with plain lists and searches."""

    def __init__(self, num_blocks: int, block_size: int, free: list[int], is_plain: bool):
        self.block_size, self.is_plain = block_size, is_plain
        self.free = list(free)  # in the order in which blocks will be handed out
        self.references = [0] * num_blocks
        # The whole text up to the end of the block, for closed blocks; None while open or never written.
        self.text: list[tuple[int, ...] | None] = [None] * num_blocks
        # The whole text up to what of the block is computed and can be copied.
        self.computed: list[tuple[int, ...]] = [()] * num_blocks
        self.newest: dict[tuple[int, ...], int] = {}  # the block closed last with this text
        self.handed_out: set[int] = set()  # by the last operation

    def prefix(self, tokens: list[int], i: int) -> tuple[int, ...]:
        return tuple(tokens[: (i + 1) * self.block_size])

    def num_hits(self, tokens: list[int]) -> int:
        """How many whole blocks of this prompt can be found."""
        most = (len(tokens) - 1) // self.block_size
        there = self.newest if self.is_plain else self.text  # of equal blocks hashes lead to the newest only
        return next((i for i in range(most) if self.prefix(tokens, i) not in there), most)

    def num_copied(self, tokens: list[int], start: int) -> int:
        """How many tokens from this one on some block has, behind the same ones."""
        most = 0
        for text in () if self.is_plain else self.computed:
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
        if self.newest.get(self.text[block_id]) == block_id:
            del self.newest[self.text[block_id]]
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
                self.newest[self.prefix(tokens, i)] = table[-1]
        return table

    def compute(self, tokens: list[int], table: list[int]) -> None:
        for i, block_id in enumerate(table):
            self.computed[block_id] = self.prefix(tokens, i)

    def append(self, tokens: list[int], table: list[int]) -> None:
        if len(tokens) % self.block_size == 1:
            table.append(self.hand_out())
        elif len(tokens) % self.block_size == 0:
            self.text[table[-1]] = self.computed[table[-1]] = tuple(tokens)
            self.newest[tuple(tokens)] = table[-1]

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

    prefix_cache = PrefixCache

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(2, 6))
    def start(self, num_blocks, block_size):
        self.block_size = block_size
        self.manager = Manager(num_blocks, block_size, prefix_cache=self.prefix_cache())
        is_plain = self.prefix_cache is PrefixCache
        self.pool = Pool(num_blocks, block_size, list(self.manager.free_block_ids), is_plain)
        assert sorted(self.pool.free) == list(range(num_blocks))
        self.findable: dict[int, int] = {}  # hash_to_block_id after the operation before
        self.live: list[Sequence] = []
        self.tables: list[list[int]] = []
        self.new: list[Sequence] = []  # of the live ones, those that are not computed yet
        self.gone: list[Sequence] = []

    def admit(self, sequence: Sequence) -> bool:
        tokens = list(sequence.token_ids)
        hit = self.manager.prefix_cache.find(sequence)
        start = len(hit.blocks) * self.block_size
        num_copied = hit.num_tokens - start
        source = hit.source if num_copied else -1
        assert len(hit.blocks) == self.pool.num_hits(tokens)
        num_new, num_free = self.pool.new_blocks(tokens, hit.blocks), len(self.pool.free)
        if num_copied == 0 and num_new >= num_free:
            assert not hit.pins, "no room to keep the source"
        else:
            assert num_copied == self.pool.num_copied(tokens, start)
        fits = self.manager.can_allocate(sequence)
        assert bool(fits) == (num_new <= num_free)
        if not fits:
            return False
        if num_copied:
            read = self.pool.computed[source][: start + num_copied]
            assert read == tuple(tokens[: start + num_copied])
        self.manager.allocate(sequence)
        assert sequence.num_cached_tokens == start + num_copied < len(tokens)
        assert sequence.num_cached_blocks == len(hit.blocks)
        table = self.pool.allocate(tokens, hit.blocks, source)
        assert list(sequence.block_table) == table
        copy = (source, table[len(hit.blocks)], num_copied) if num_copied else None
        assert copy_for(self.manager, sequence) == copy
        self.live.append(sequence)
        self.tables.append(table)
        self.new.append(sequence)
        return True

    @rule()
    def compute(self):
        for block_id in self.manager.prefix_cache.pinned:
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
