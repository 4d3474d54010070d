"""Plans cascade attention: which sequences of a decode step share a prefix, and how the step reads it once.

Knows prompts and tables of numbers; nothing about blocks or devices. Equal tokens at equal positions have
equal keys and values, wherever these are stored, so comparing prompts is enough. In a sorted list of the
prompts those that share a prefix are neighbours, and the lengths that neighbours have in common describe a
tree of prefixes. `CascadePlan` explains the tables.
"""

from bisect import insort
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.prefixes.kernels.shared_prefix import MAX_PARTIALS, CascadePlan, plan_shapes
from nanovllm.extensions.prefixes.token_prefixes import count_common, pack

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
    def num_saved(self) -> int:
        """Tokens that a step need not read."""
        return (self.last - self.first - 1) * (self.end - self.begin)


class CascadePlanner:
    """
    `queries_per_item` queries share one pass over keys and values; about `num_items` work items keep a device
    busy.
    """

    unit = 1  # of which prefixes are multiples, in tokens

    def __init__(self, num_rows: int, queries_per_item: int, num_items: int):
        self.num_rows = num_rows
        self.queries_per_item = queries_per_item
        self.num_items = num_items
        self._prompts: list[tuple[bytes, int]] = []  # sorted, each with its seq_id
        self._common: dict[tuple[int, int], int] = {}  # tokens that neighbours share, by their seq_ids
        self.num_prefix_tokens = 0  # of all sequences, that a step reads through prefixes

    def update(self, sequences: list[Sequence]) -> np.ndarray | None:
        """
        The tables for these sequences, in the order of the batch, one behind another: int32 [words]. None if
        no prefix is worth sharing (`num_prefix_tokens` is 0 then). Where a table would not have room: longer
        spans, then fewer prefixes.
        """
        rows = {seq.seq_id: i for i, seq in enumerate(sequences)}
        self._sort(sequences, rows)
        self.num_prefix_tokens = 0
        common = np.array([*self._common.values(), 0]) // self.unit * self.unit
        min_saved = MIN_PREFIX_SAVED
        while common.max() >= MIN_SHARED_TOKENS:
            prefixes = choose_prefixes(common, min_saved)
            if sum(prefix.num_saved for prefix in prefixes) < MIN_SAVED_TOKENS:
                break
            if (counts := self._divide(prefixes)) is not None:
                plan = self._make_plan(prefixes, counts, rows)
                self.num_prefix_tokens = int(plan.prefix_lens.sum())
                return np.concatenate([table.ravel() for table in plan])
            min_saved *= 2
        return None

    def _sort(self, sequences: list[Sequence], rows: dict[int, int]) -> None:
        """Sort the prompts of the sequences, which have these ids, and compare neighbours."""
        self._prompts = [each for each in self._prompts if each[1] in rows]
        known = {seq_id for _, seq_id in self._prompts}
        for seq in sequences:
            if seq.num_prompt_tokens >= MIN_SHARED_TOKENS and seq.seq_id not in known:
                insort(self._prompts, (pack(seq.request.token_ids), seq.seq_id))
        before, self._common = self._common, {}
        for (first, a), (second, b) in pairwise(self._prompts):
            pair = a, b
            self._common[pair] = before[pair] if pair in before else count_common(first, second)

    def _divide(self, prefixes: list[Prefix]) -> np.ndarray | None:
        """The number of spans of each prefix, so that the device is busy; None if a table has no room."""
        room = plan_shapes(len(self._prompts))
        first, last, begin, end = np.array(prefixes).T
        lengths = end - begin
        items = -((first - last) // self.queries_per_item)  # of a span
        prompts = np.arange(len(self._prompts))[:, None]
        has_prefix = (first <= prompts) & (prompts < last)  # [prompts, prefixes]
        most = np.clip(lengths // MIN_ITEM_TOKENS, 1, MAX_PARTIALS)
        span = max(MIN_ITEM_TOKENS, items @ lengths / self.num_items)
        while True:
            counts = np.clip(np.rint(lengths / span).astype(int), 1, most)
            num_partials = has_prefix @ counts
            if (
                num_partials.max() <= MAX_PARTIALS
                and num_partials.sum() <= room.queries[0]
                and items @ counts <= room.work_items[0]
            ):
                return counts
            if counts.max() == 1:
                return None
            span *= 1.1

    def _make_plan(self, prefixes: list[Prefix], counts: np.ndarray, rows: dict[int, int]) -> CascadePlan:
        """With so many spans of each prefix, for sequences with these ids."""
        shapes = plan_shapes(self.num_rows)
        plan = CascadePlan(*(np.zeros(shape, np.int32) for shape in shapes))
        num_queries, items = 0, []
        order = np.array([rows[seq_id] for _, seq_id in self._prompts])
        for prompts, bounds, common in self._spans(prefixes, counts):
            sharing = order[prompts]
            plan.prefix_lens[sharing] = bounds[-1]
            plan.readers[sharing] = sharing[0], common
            for span in pairwise(bounds):
                queries = range(num_queries, num_queries + len(sharing))
                num_queries = queries.stop
                plan.queries[queries] = sharing
                plan.partials[sharing, plan.num_partials[sharing]] = queries
                plan.num_partials[sharing] += 1
                items += [
                    (first, min(self.queries_per_item, num_queries - first), *span)
                    for first in queries[:: self.queries_per_item]
                ]
        plan.work_items[: len(items)] = items
        plan.num_work_items[0] = len(items)
        return plan

    def _spans(self, prefixes: list[Prefix], counts: np.ndarray) -> Iterator[tuple]:
        """
        For each prefix its prompts of the sorted list, where its spans begin and the last one ends, and how
        much each reads in the first one's blocks.
        """
        for prefix, count in zip(prefixes, counts, strict=True):
            # Spans of nearly the same length.
            length = prefix.end - prefix.begin
            starts = length * np.arange(count) // count // ITEM_STEP * ITEM_STEP
            bounds = [*(prefix.begin + starts), prefix.end]
            yield slice(prefix.first, prefix.last), bounds, 0


class WholePrefixPlanner(CascadePlanner):
    """
    For kernels that add up tokens in order. A sequence reads one prefix, the longest of those that it has in
    common with others, from its first token on, and to a multiple of ITEM_STEP. What it has in common behind
    that it reads in the blocks of the first of these others, where all find it in the L2 cache.
    """

    unit = ITEM_STEP

    def _divide(self, prefixes: list[Prefix]) -> np.ndarray:
        return np.ones(len(prefixes), int)

    def _spans(self, prefixes: list[Prefix], counts: np.ndarray) -> Iterator[tuple]:
        longest = np.full(len(self._prompts), -1)
        for i, prefix in enumerate(prefixes):  # each in front of those that continue it
            longest[prefix.first : prefix.last] = i
        for i, prefix in enumerate(prefixes):
            prompts = np.flatnonzero(longest == i)
            if len(prompts):
                common = min([*self._common.values()][prompts[0] : prompts[-1]], default=0)
                yield prompts, [0, prefix.end], common


def choose_prefixes(common: np.ndarray, min_saved: int) -> list[Prefix]:
    """
    The prefixes worth sharing, each in front of those that continue it. common[i] is what prompts i and i + 1
    have in common; the last prompt has no other behind it.
    """
    chosen = []
    rest = [(0, len(common), 0)]  # prompts first..last, of which prefixes cover `begin` tokens
    while rest:
        first, last, begin = rest.pop()
        if last - first < 2:
            continue
        between = common[first : last - 1]
        prefix = Prefix(first, last, begin, int(between.min()))
        if prefix.end - begin >= MIN_SHARED_TOKENS and prefix.num_saved >= min_saved:
            chosen.append(prefix)
            begin = prefix.end
        # Prompts that have no more in common part here.
        cuts = first + 1 + np.flatnonzero(between == prefix.end)
        for part in pairwise([first, *cuts, last]):
            rest.append((*part, begin))
    return chosen
