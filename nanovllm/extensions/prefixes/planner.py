"""Plans cascade attention: which sequences of a decode step share a prefix, and how the step reads it once.

Knows prompts and tables of numbers; nothing about blocks or devices. Equal tokens at equal positions have
equal keys and values, wherever these are stored, so comparing prompts is enough. In a sorted list of the
prompts those that share a prefix are neighbours, and the lengths that neighbours have in common describe a
tree of prefixes. plan.py explains the tables.
"""

from bisect import insort
from itertools import pairwise
from operator import mul
from typing import NamedTuple

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.prefixes.plan import (
    MAX_PARTIALS,
    CascadePlan,
    max_queries,
    max_work_items,
    plan_shapes,
)
from nanovllm.extensions.prefixes.prefix_index import count_common
from nanovllm.kernels.runtime import cdiv

# Where sharing begins to pay, measured on an H200 with 8 kv heads of 128 and bfloat16: two sequences from 128
# to 256 tokens on, four from 64 on; a whole step from 8,000 to 16,000 tokens on that are not read.
MIN_SHARED_TOKENS = 64  # length of a prefix, behind the prefix that it continues
MIN_PREFIX_SAVED = 192  # tokens that a prefix saves: (queries - 1) * length
MIN_SAVED_TOKENS = 16_384  # tokens that all prefixes of a step save: else each sequence reads its own
MIN_ITEM_TOKENS = 256  # of a work item, if its prefix has so many
ITEM_STEP = 128  # work items begin at multiples of this, counted from where their prefix begins


class Prefix(NamedTuple):
    """Prompts first..last of the sorted list share tokens begin..end; shorter prefixes cover 0..begin."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def num_saved(self) -> int:
        """Tokens that a step need not read."""
        return (self.last - self.first - 1) * self.length

    def spans(self, count: int) -> list[tuple[int, int]]:
        """Divided into so many spans of nearly the same length."""
        steps = [self.length * i // count // ITEM_STEP for i in range(count)]
        return [*pairwise([*(self.begin + step * ITEM_STEP for step in steps), self.end])]


class CascadePlanner:
    """
    Plans for the sequences given last, and knows what the devices were told. `queries_per_item` queries share
    one pass over keys and values; about `num_items` work items keep a device busy.
    """

    def __init__(self, num_rows: int, queries_per_item: int, num_items: int):
        self.num_rows = num_rows
        self.queries_per_item, self.num_items = queries_per_item, num_items
        self.reset()

    def reset(self) -> None:
        """Forget all sequences and what was sent."""
        self._prompts: list[tuple[bytes, int]] = []  # sorted, each with its seq_id
        self._common: dict[tuple[int, int], int] = {}  # tokens that neighbours share, by their seq_ids
        self._sent = np.zeros(sum(map(np.prod, plan_shapes(self.num_rows))), np.int32)
        self.num_prefix_tokens = 0  # of all sequences, that a step reads through prefixes

    def update(self, sequences: list[Sequence]) -> np.ndarray | None:
        """
        To be called when other sequences decode than in the last step, or in another order. Returns what
        changes in the tables, int32 [2, changes]: indices and values. None if nothing does, or if no prefix
        is shared (`num_prefix_tokens` is 0 then): nobody reads the tables.
        """
        long = [(i, seq) for i, seq in enumerate(sequences) if seq.num_prompt_tokens >= MIN_SHARED_TOKENS]
        rows = {seq.seq_id: i for i, seq in long}
        self._sort([seq for _, seq in long])
        prefixes, counts, prefix_lens = self._plan()
        self.num_prefix_tokens = int(prefix_lens.sum())
        if not prefixes:
            return None
        order = np.array([rows[seq_id] for _, seq_id in self._prompts])
        words = self._make_tables(prefixes, counts, prefix_lens, order)
        (changed,) = np.nonzero(words != self._sent)
        self._sent = words
        return np.stack([changed, words[changed]]).astype(np.int32) if len(changed) else None

    def _sort(self, sequences: list[Sequence]) -> None:
        """Sort the prompts of these sequences and compare neighbours; only new ones cost much."""
        seq_ids = {seq.seq_id for seq in sequences}
        self._prompts = [(prompt, seq_id) for prompt, seq_id in self._prompts if seq_id in seq_ids]
        known = {seq_id for _, seq_id in self._prompts}
        for seq in sequences:
            if seq.seq_id not in known:
                insort(self._prompts, (seq.request.packed, seq.seq_id))
        common = self._common
        self._common = {
            (a, b): common[a, b] if (a, b) in common else count_common(first, second)
            for (first, a), (second, b) in pairwise(self._prompts)
        }

    def _plan(self) -> tuple[list[Prefix], list[int], np.ndarray]:
        """
        The prefixes to share, the number of spans of each, and how many tokens of each prompt they cover.
        Where a table would not have room: longer spans, then fewer prefixes.
        """
        if max(self._common.values(), default=0) >= MIN_SHARED_TOKENS:
            intervals, min_saved = find_intervals([*self._common.values()]), MIN_PREFIX_SAVED
            while True:
                prefixes, prefix_lens = self._choose(intervals, min_saved)
                if not prefixes or sum(prefix.num_saved for prefix in prefixes) < MIN_SAVED_TOKENS:
                    break
                if counts := self._divide(prefixes):
                    return prefixes, counts, prefix_lens
                min_saved *= 2
        return [], [], np.zeros(0, np.int32)

    def _choose(
        self, intervals: list[tuple[int, int, int]], min_saved: int
    ) -> tuple[list[Prefix], np.ndarray]:
        """The prefixes worth sharing, and how many tokens of each prompt they cover."""
        prefix_lens = np.zeros(len(self._prompts), np.int32)
        prefixes = []
        for first, last, end in intervals:
            prefix = Prefix(first, last, int(prefix_lens[first]), end)
            if prefix.length >= MIN_SHARED_TOKENS and prefix.num_saved >= min_saved:
                prefixes.append(prefix)
                prefix_lens[first:last] = end
        return prefixes, prefix_lens

    def _divide(self, prefixes: list[Prefix]) -> list[int] | None:
        """The number of spans of each prefix, so that the device is busy; None if a table has no room."""
        batch_size = len(self._prompts)
        items = [cdiv(prefix.last - prefix.first, self.queries_per_item) for prefix in prefixes]  # of a span
        lengths = [prefix.length for prefix in prefixes]
        span = max(MIN_ITEM_TOKENS, sum(map(mul, items, lengths)) / self.num_items)
        while True:
            counts = [max(1, min(round(n / span), n // MIN_ITEM_TOKENS, MAX_PARTIALS)) for n in lengths]
            num_partials = np.zeros(batch_size, np.int32)
            for prefix, count in zip(prefixes, counts, strict=True):
                num_partials[prefix.first : prefix.last] += count
            has_room = num_partials.max() <= MAX_PARTIALS and num_partials.sum() <= max_queries(batch_size)
            if has_room and sum(map(mul, items, counts)) <= max_work_items(batch_size):
                return counts
            if max(counts) == 1:
                return None
            span *= 1.1

    def _make_tables(
        self, prefixes: list[Prefix], counts: list[int], prefix_lens: np.ndarray, order: np.ndarray
    ) -> np.ndarray:
        """All tables, one after another. order[i] is the row of the batch that has the i-th sorted prompt."""
        tables = CascadePlan(*(np.zeros(shape, np.int32) for shape in plan_shapes(self.num_rows)))
        tables.prefix_lens[order] = prefix_lens
        queries: list[int] = []
        items = []
        for prefix, count in zip(prefixes, counts, strict=True):
            rows = order[prefix.first : prefix.last]
            for begin, end in prefix.spans(count):
                start = len(queries)
                queries.extend(rows)
                tables.partials[rows, tables.num_partials[rows]] = range(start, len(queries))
                tables.num_partials[rows] += 1
                for first in range(start, len(queries), self.queries_per_item):
                    items.append((first, min(self.queries_per_item, len(queries) - first), begin, end))
        tables.queries[: len(queries)] = queries
        tables.work_items[: len(items)] = items
        tables.num_work_items[0] = len(items)
        return np.concatenate([table.ravel() for table in tables])


def find_intervals(common: list[int]) -> list[tuple[int, int, int]]:
    """
    All (first, last, length) so that exactly `length` tokens are common to the prompts first..last and to no
    other prompt; shorter ones first. common[i] is what prompts i and i + 1 have in common.
    """
    found = []
    open_ones = [(0, 0)]  # (length, first) of those that have not ended, each longer than the one before it
    for place, length in enumerate([*common, 0], 1):
        first = place - 1
        while open_ones[-1][0] > length:
            longer, first = open_ones.pop()
            found.append((first, place, longer))
        if open_ones[-1][0] < length:
            open_ones.append((length, first))
    return sorted(found, key=lambda interval: (interval[0], -interval[1]))
