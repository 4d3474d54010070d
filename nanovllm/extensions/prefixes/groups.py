"""Which sequences of a decode step begin with the same tokens, and how the step reads these once for all.

Knows prompts and tables of numbers; nothing about blocks or devices. Equal tokens at equal places have equal
keys and values, wherever these are stored, so what prompts have in common decides. In a sorted list of the
prompts those that begin alike are neighbours, and the lengths that neighbours have in common describe a tree:
groups, and groups within groups. What the tables say, `SharedPrefixes` in kernels/shared_prefix.py explains.
"""

from bisect import bisect_left
from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

import numpy as np

from nanovllm.engine.sequence import TOKEN_BYTES, Sequence

# Where reading together begins to pay, measured on an H200 with 8 kv heads of 128 and bfloat16: two sequences
# from 128 to 256 tokens on, four from 64 on; a whole step from 8,000 to 16,000 tokens on that are not read.
MIN_SHARED_TOKENS = 64  # that a group reads for its members
MIN_GROUP_SAVED = 192  # tokens that a group must read less often: (members - 1) * tokens
MIN_SAVED_TOKENS = 16_384  # the same for all groups of a step: else each sequence reads its own
MIN_PIECE = 256  # tokens of a task, if its group has so many
PIECE_STEP = 128


def max_slots(batch_size: int) -> int:
    """Most partial results of a step. Small batches may have more for each, to keep the device busy."""
    return max(4 * batch_size, min(16 * batch_size, 512))


def max_tasks(batch_size: int) -> int:
    return max(2 * batch_size, 64)


def table_sizes(num_rows: int, max_parts: int) -> dict[str, int]:
    """The int32 words of each table of `SharedPrefixes`."""
    sizes = {"prefix_lens": num_rows, "num_parts": num_rows, "parts": max_parts * num_rows}
    return sizes | {"members": max_slots(num_rows), "tasks": 4 * max_tasks(num_rows), "num_tasks": 4}


class Group(NamedTuple):
    """Prompts low..high of the sorted list have tokens begin..end in common; larger groups read 0..begin."""

    low: int
    high: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.high - self.low

    @property
    def length(self) -> int:
        return self.end - self.begin

    def bounds(self, num_pieces: int) -> list[int]:
        """Where pieces of nearly the same length begin, and the end."""
        steps = (self.length * i // num_pieces // PIECE_STEP for i in range(num_pieces))
        return [*(self.begin + step * PIECE_STEP for step in steps), self.end]


class PrefixGroups:
    """
    The groups of the sequences given last, and what the devices were told of them. `members_per_task`
    sequences share one pass over keys and values; about `num_tasks` tasks fill a device.
    """

    def __init__(self, num_rows: int, max_parts: int, members_per_task: int, num_tasks: int):
        self.num_rows, self.max_parts = num_rows, max_parts
        self.members_per_task, self.num_tasks = members_per_task, num_tasks
        self.reset()

    def reset(self) -> None:
        """Forget all sequences and what was sent."""
        self._keys: dict[int, bytes] = {}  # by seq_id, the prompt as bytes, which are quick to compare
        self._sorted: list[tuple[bytes, int]] = []  # the same, as (prompt, seq_id)
        self._common: list[int] = []  # tokens that each has in common with the one before; 0 if they are few
        self._sent = np.zeros(sum(table_sizes(self.num_rows, self.max_parts).values()), np.int32)
        self.num_grouped_tokens = 0  # that groups read for their members in one step

    def update(self, sequences: list[Sequence]) -> np.ndarray | None:
        """
        To be called when other sequences decode than in the last step, or in another order. Returns what
        changes in the tables, int32 [2, changes]: indices and values. None if nothing does, or if there are
        no groups (`num_grouped_tokens` is 0 then): nobody reads the tables.
        """
        long = [(i, seq) for i, seq in enumerate(sequences) if seq.num_prompt_tokens >= MIN_SHARED_TOKENS]
        places = {seq.seq_id: place for place, seq in long}
        for seq_id in self._keys.keys() - places.keys():
            self._leave(seq_id)
        for _, seq in long:
            if seq.seq_id not in self._keys:
                self._join(seq)
        groups, num_pieces, prefix_lens = self._plan()
        self.num_grouped_tokens = int(prefix_lens.sum())
        if not groups:
            return None
        order = np.array([places[seq_id] for _, seq_id in self._sorted])
        tables = self._tables(groups, num_pieces, prefix_lens, order)
        (changed,) = np.nonzero(tables != self._sent)
        self._sent = tables
        return np.stack([changed, tables[changed]]).astype(np.int32) if len(changed) else None

    def _join(self, seq: Sequence) -> None:
        key = self._keys[seq.seq_id] = seq.packed_prompt
        place = bisect_left(self._sorted, (key, seq.seq_id))
        self._sorted.insert(place, (key, seq.seq_id))
        self._common.insert(place, count_common(self._sorted[place - 1][0], key) if place else 0)
        if place + 1 < len(self._sorted):
            self._common[place + 1] = count_common(key, self._sorted[place + 1][0])

    def _leave(self, seq_id: int) -> None:
        place = bisect_left(self._sorted, (self._keys.pop(seq_id), seq_id))
        del self._sorted[place]
        common = self._common.pop(place)
        if place < len(self._common):
            self._common[place] = min(common, self._common[place])

    def _plan(self) -> tuple[list[Group], list[int], np.ndarray]:
        """
        The groups, in how many pieces to read each, and the tokens that groups read for each prompt of the
        sorted list. Where a table would not have room: larger pieces, then fewer groups.
        """
        if max(self._common, default=0):
            intervals, min_saved = find_intervals(self._common), MIN_GROUP_SAVED
            while True:
                groups, prefix_lens = self._choose(intervals, min_saved)
                if not groups or sum((g.size - 1) * g.length for g in groups) < MIN_SAVED_TOKENS:
                    break
                if num_pieces := self._divide(groups):
                    return groups, num_pieces, prefix_lens
                min_saved *= 2
        return [], [], np.zeros(0, np.int32)

    def _choose(
        self, intervals: Iterable[tuple[int, int, int]], min_saved: int
    ) -> tuple[list[Group], np.ndarray]:
        """The groups worth reading together. Groups within one that is not, or the prompts, read its part."""
        prefix_lens = np.zeros(len(self._sorted), np.int32)
        groups = []
        for low, high, end in intervals:
            group = Group(low, high, int(prefix_lens[low]), end)
            if group.length >= MIN_SHARED_TOKENS and (group.size - 1) * group.length >= min_saved:
                groups.append(group)
                prefix_lens[low:high] = end
        return groups, prefix_lens

    def _divide(self, groups: list[Group]) -> list[int] | None:
        """The number of pieces of each group, so that tasks fill the device; None if a table has no room."""
        batch_size = len(self._sorted)
        chunks = [-(-group.size // self.members_per_task) for group in groups]
        lengths = [group.length for group in groups]
        piece = max(MIN_PIECE, sum(map(mul, chunks, lengths)) / self.num_tasks)

        def has_room(pieces: list[int]) -> bool:
            num_parts = np.zeros(batch_size, np.int32)
            for group, count in zip(groups, pieces, strict=True):
                num_parts[group.low : group.high] += count
            is_full = num_parts.max() > self.max_parts or num_parts.sum() > max_slots(batch_size)
            return not is_full and sum(map(mul, chunks, pieces)) <= max_tasks(batch_size)

        if not has_room([1] * len(groups)):
            return None
        while True:
            pieces = [max(1, min(round(n / piece), n // MIN_PIECE, self.max_parts)) for n in lengths]
            if has_room(pieces):
                return pieces
            piece *= 1.1

    def _tables(
        self, groups: list[Group], num_pieces: list[int], prefix_lens: np.ndarray, order: np.ndarray
    ) -> np.ndarray:
        """All tables, one after another. `order` has the place in the batch of each in the sorted list."""
        parts = np.zeros((len(order), self.max_parts), np.int32)
        num_parts = np.zeros(len(order), np.int32)
        members, tasks, slot = [], [], 0
        for group, count in zip(groups, num_pieces, strict=True):
            low, high, size = group.low, group.high, group.size
            bounds = group.bounds(count)
            for span in zip(bounds, bounds[1:], strict=False):
                parts[low:high, num_parts[low]] = range(slot, slot + size)
                num_parts[low:high] += 1
                members.append(order[low:high])
                for first in range(0, size, self.members_per_task):
                    tasks.append((slot + first, min(self.members_per_task, size - first), *span))
                slot += size
        sizes = table_sizes(self.num_rows, self.max_parts)
        buffer = np.zeros_like(self._sent)
        tables = dict(zip(sizes, np.split(buffer, np.cumsum([*sizes.values()])[:-1]), strict=True))
        tables["prefix_lens"][order] = prefix_lens
        tables["num_parts"][order] = num_parts
        tables["parts"].reshape(-1, self.max_parts)[order] = parts
        tables["members"][:slot] = np.concatenate(members)
        tables["tasks"][: 4 * len(tasks)] = np.ravel(tasks)
        tables["num_tasks"][0] = len(tasks)
        return buffer


def count_common(first: bytes, second: bytes) -> int:
    """How many tokens two prompts begin with in common; 0 if they are too few for a group."""
    low, high = MIN_SHARED_TOKENS, min(len(first), len(second)) // TOKEN_BYTES
    if high < low or not first.startswith(second[: low * TOKEN_BYTES]):
        return 0
    while low < high:  # the first `low` are equal, and no more than `high`
        middle = (low + high + 1) // 2
        if first.startswith(second[low * TOKEN_BYTES : middle * TOKEN_BYTES], low * TOKEN_BYTES):
            low = middle
        else:
            high = middle - 1
    return low


def find_intervals(common: list[int]) -> list[tuple[int, int, int]]:
    """
    All (low, high, length) so that exactly `length` tokens are common to the prompts low..high and to no
    other prompt; larger ones before those within them. common[i] is what prompts i - 1 and i have in common.
    """
    found = []
    open_ones = [(0, 0)]  # (length, low) of those that have not ended, each longer than the one before it
    for place, length in enumerate([*common[1:], 0], 1):
        low = place - 1
        while open_ones[-1][0] > length:
            longer, low = open_ones.pop()
            found.append((low, place, longer))
        if open_ones[-1][0] < length:
            open_ones.append((length, low))
    return sorted(found, key=lambda interval: (interval[0], -interval[1]))
