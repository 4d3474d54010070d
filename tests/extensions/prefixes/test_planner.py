"""Prefixes that a decode step reads once: what the tables say of them, and that answers do not change."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from cascades import cascade_config, make_cascade
from cases import slow
from forked_ranks import forked_ranks  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import BatchMaker
from nanovllm.engine.block_manager import PrefixCache
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.extensions.prefixes import planner as module
from nanovllm.extensions.prefixes.kernels.shared_prefix import MAX_PARTIALS, CascadePlan, plan_shapes
from nanovllm.extensions.prefixes.planner import CascadePlanner, WholePrefixPlanner
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

NUM_ROWS, PER_ITEM, NUM_ITEMS = 40, 4, 12


class Tables:
    """A device's tables, which know only what they are sent."""

    def __init__(self):
        shapes = plan_shapes(NUM_ROWS)
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.buffer = np.zeros(sum(sizes), np.int32)
        views = zip(np.split(self.buffer, np.cumsum(sizes)[:-1]), shapes, strict=True)
        self.plan = CascadePlan(*(words.reshape(shape) for words, shape in views))

    def apply(self, words: np.ndarray | None) -> None:
        if words is not None:
            self.buffer[:] = words

    def __getattr__(self, name: str) -> np.ndarray:
        return getattr(self.plan, name)

    @property
    def used_items(self) -> list[list[int]]:
        return self.work_items[: self.num_work_items[0]].tolist()

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Of the partial results of a sequence, in order."""
        indices = self.partials[row, : self.num_partials[row]].tolist()
        items = ([item for item in self.used_items if item[0] <= i < item[0] + item[1]] for i in indices)
        return sorted((begin, end) for [(_, _, begin, end)] in items)


def make_planner(kind: type[CascadePlanner] = CascadePlanner) -> CascadePlanner:
    return kind(NUM_ROWS, PER_ITEM, NUM_ITEMS)


def check(tables: Tables, sequences: list[Sequence], per_item: int = PER_ITEM) -> None:
    """What the kernels rely on."""
    size = len(sequences)
    prompts = [seq.prompt_token_ids for seq in sequences]
    assert len(tables.used_items) <= plan_shapes(size).work_items[0]
    queries: dict[int, int] = {}
    for first, count, begin, end in tables.used_items:
        rows = tables.queries[first : first + count].tolist()
        assert 1 <= count <= per_item and begin < end and len(set(rows)) == count
        head = prompts[rows[0]][:end]
        assert len(head) == end and all(prompts[row][:end] == head for row in rows)
        for query, row in enumerate(rows, first):
            assert queries.setdefault(query, row) == row
    assert len(queries) == sum(item[1] for item in tables.used_items) == tables.num_partials.sum()
    assert max(queries) < plan_shapes(size).queries[0] and tables.num_partials.max() <= MAX_PARTIALS
    for row, prefix_len in enumerate(tables.prefix_lens[:size]):
        partials = tables.partials[row, : tables.num_partials[row]]
        assert all(queries[query] == row for query in partials.tolist())
        spans = tables.spans(row)
        assert [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), prefix_len]
        reader, common_len = tables.readers[row]
        assert prompts[row][:common_len] == prompts[reader][:common_len]
    for name in ("prefix_lens", "num_partials", "readers"):  # a padded batch has nothing to read
        assert not getattr(tables, name)[size:].any()


class Prompts:
    """Prompts that share beginnings, which share beginnings: each is one made before, cut and prolonged."""

    def __init__(self, pick: random.Random, most_tokens: int):
        self.pick, self.most_tokens, self.made = pick, most_tokens, [[]]

    def make(self) -> Sequence:
        prompt = self.pick.choice(self.made)
        if self.pick.random() < 0.5:
            prompt = prompt[: self.pick.randrange(len(prompt) + 1)]
        if self.pick.random() < 0.8 or not prompt:
            length = self.pick.choice([1, 5, 70, 300, self.most_tokens])
            # Ids of which some have bytes in common, which is not enough.
            prompt = [*prompt, *[self.pick.choice([1, 257, 65537, 2**31 - 1])] * length]
        prompt = prompt[: self.most_tokens]
        self.made.append(prompt)
        seq = Sequence(Request(prompt))
        seq.append_token(1)
        return seq


@pytest.mark.parametrize("kind", [CascadePlanner, WholePrefixPlanner])
@pytest.mark.parametrize("min_saved", [1, 2000])
@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([300, 5000]))
def test_whatever_joins_and_leaves_the_tables_are_right(kind, min_saved, pick, most_tokens):
    prompts, planner, tables = Prompts(pick, most_tokens), make_planner(kind), Tables()
    running: list[Sequence] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_SAVED_TOKENS", min_saved)
        patch.setattr(module, "MIN_PREFIX_SAVED", 1)
        for _ in range(12):
            running = [seq for seq in running if pick.random() < 0.8]
            joining = pick.choice([0, 1, 2, NUM_ROWS])
            running += [prompts.make() for _ in range(min(joining, NUM_ROWS - len(running)))]
            pick.shuffle(running)
            tables.apply(planner.update(running))
            assert (planner.update(running) is None) is (planner.num_prefix_tokens == 0)
            fresh, from_scratch = make_planner(kind), Tables()
            from_scratch.apply(fresh.update(running))
            assert fresh.num_prefix_tokens == planner.num_prefix_tokens
            if planner.num_prefix_tokens:
                check(tables, running)
                assert tables.prefix_lens.sum() == planner.num_prefix_tokens
                assert (tables.buffer == from_scratch.buffer).all()
                if kind is WholePrefixPlanner:
                    assert tables.num_partials.max() == 1
                    assert all(begin == end % 128 == 0 for _, _, begin, end in tables.used_items)


@pytest.mark.parametrize("kind", [CascadePlanner, WholePrefixPlanner])
@settings(max_examples=40, deadline=None)
@given(pick=st.randoms(use_true_random=False))
def test_a_sequence_shares_all_that_it_has_in_common_with_another(kind, pick):
    """Or, in whole prefixes, as many times 128 tokens as that is."""
    prompts, step = Prompts(pick, 700), 1 if kind is CascadePlanner else 128
    running = [prompts.make() for _ in range(5)]
    tables = Tables()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_SAVED_TOKENS", 0)
        patch.setattr(module, "MIN_PREFIX_SAVED", 1)
        patch.setattr(module, "MIN_SHARED_TOKENS", 1)
        tables.apply(make_planner(kind).update(running))
    for place, seq in enumerate(running):
        others = [other.prompt_token_ids for other in running if other is not seq]
        most = max(common(seq.prompt_token_ids, other) for other in others)
        assert tables.prefix_lens[place] == most // step * step


def common(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def tables_of(prompts: list[list[int]]) -> Tables:
    tables = Tables()
    tables.apply(make_planner().update([Sequence(Request(prompt)) for prompt in prompts]))
    return tables


def test_behind_whole_tiles_tokens_in_common_are_read_in_the_blocks_of_one_sequence():
    shared = [*range(2005)]
    prompts = [[*shared, i] for i in (50, 30, 40)] + [[7] * 300, [*shared, 30, *range(900), 1]]
    prompts.append([*prompts[-1][:-1], 2])
    planner, tables = make_planner(WholePrefixPlanner), Tables()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_SAVED_TOKENS", 0)
        tables.apply(planner.update([Sequence(Request(prompt)) for prompt in prompts]))
    assert tables.prefix_lens[:6].tolist() == [1920, 1920, 1920, 0, 2816, 2816]
    assert tables.readers[:6].tolist() == [[1, 2005]] * 3 + [[0, 0]] + [[4, 2906]] * 2


def test_prefixes_within_prefixes():
    system, first, second = [1] * 2000, [2] * 6000, [3] * 500
    documents = [[*system, *first, i] for i in (10, 11)] + [[*system, *second, i] for i in range(10, 20)]
    tables = tables_of([[5] * 50, *documents, system])
    assert tables.prefix_lens[:14].tolist() == [0, *2 * [8000], *10 * [2500], 2000]
    assert not tables.spans(0) and tables.spans(1)[-1][1] == 8000 and tables.spans(3)[-1] == (2000, 2500)
    assert {end for begin, end in tables.spans(1)} > {end for begin, end in tables.spans(13)}
    lengths = [end - begin for _, _, begin, end in tables.used_items]
    assert min(lengths) >= 256 and len(lengths) >= NUM_ITEMS / 2
    assert all((begin - 2000 * (begin >= 2000)) % 128 == 0 for _, _, begin, _ in tables.used_items)


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        [[1] * 20000],
        [[i] * 20000 for i in range(4)],
        [[1] * 60 + [i] * 20000 for i in range(4)],  # what they share is short
        [[1] * 500 + [i] for i in range(4)],  # sharing saves little
    ],
    ids=["nobody", "one", "nothing in common", "short", "small"],
)
def test_who_gains_little_reads_alone(prompts):
    planner = make_planner()
    assert planner.update([Sequence(Request(prompt)) for prompt in prompts]) is None
    assert not planner.num_prefix_tokens


def test_a_prefix_too_short_to_share_is_read_with_the_longer_ones():
    pairs = [[1] * 10 + [pair] * 9000 + [i] for pair in (2, 3) for i in (4, 5)]
    tables = tables_of(pairs)
    assert tables.prefix_lens[:4].tolist() == 4 * [9010]
    assert all(tables.spans(place)[0][0] == 0 for place in range(4))


def test_a_chain_of_ever_longer_prompts_has_room():
    prompts = [[*range(100 * i), 10**6] for i in range(1, NUM_ROWS)]
    tables = tables_of(prompts)
    check(tables, [Sequence(Request(prompt)) for prompt in prompts])
    assert tables.prefix_lens.sum() > 100 * NUM_ROWS**2 / 8  # a quarter of what they have in common


@pytest.mark.parametrize(
    "prompts, most_parts",
    [
        ([[1] * 8000 + [2] * 8000] * 2 + [[1] * 8000], MAX_PARTIALS),  # both prefixes could have as many
        ([[1] * 9000] * NUM_ROWS, plan_shapes(NUM_ROWS).queries[0] / NUM_ROWS),
    ],
)
def test_a_large_device_gets_as_many_pieces_as_there_is_room_for(prompts, most_parts):
    planner, tables = CascadePlanner(NUM_ROWS, NUM_ROWS, 1000), Tables()
    sequences = [Sequence(Request(prompt)) for prompt in prompts]
    tables.apply(planner.update(sequences))
    check(tables, sequences, NUM_ROWS)
    assert most_parts * 0.8 <= tables.num_partials.max() <= most_parts


def decoding(prompts: list[list[int]]) -> list[Sequence]:
    sequences = [Sequence(Request(prompt)) for prompt in prompts]
    for row, seq in enumerate(sequences):
        seq.slot, seq.num_scheduled_tokens = row, len(prompts[row])
        seq.block_table = [row]
    return sequences


def test_a_steady_step_sends_nothing_and_a_new_sequence_in_an_old_row_is_seen():
    sizes = dict(kvcache_block_size=32768, num_kvcache_blocks=-1, max_model_len=32768)
    config = cascade_config(**sizes)
    backend = make_cascade(config)
    parts = SimpleNamespace(prefix_cache=PrefixCache(), logits_processors=())
    batches = BatchMaker(config, parts, backend)
    same, other = [1] * 18_000, [2] * 18_000
    sequences = decoding([same, same, other])
    batches.prefill(sequences)
    first, second = batches.decode(sequences), batches.decode(sequences)
    assert first.plan_key and second.plan_key and backend.stats() == {"num_grouped_tokens": 2 * 36_000}
    assert first.messages["attention"] is not None
    assert second.messages["attention"] is second.slot_updates is None
    [_, late, _] = decoding([other, other, other])
    batches.prefill([late])
    third = batches.decode([sequences[0], late, sequences[2]])
    assert third.plan_key and third.messages["attention"] is not None and third.slot_updates is None
    fourth = batches.decode([sequences[0], late, sequences[2]])
    assert fourth.plan_key and fourth.messages["attention"] is fourth.slot_updates is None
    alone = batches.decode(sequences[:1])
    assert not alone.plan_key and alone.messages["attention"] is None
    assert alone.slot_updates.shape == (2, 3)  # the batch alone
    assert backend.stats() == {"num_grouped_tokens": 4 * 36_000}
    batches.reset()
    batches.prefill(sequences)
    again = batches.decode(sequences)
    assert (again.slot_updates == first.slot_updates).all()
    assert (again.messages["attention"] == first.messages["attention"]).all()
    assert backend.stats() == {"num_grouped_tokens": 5 * 36_000}


def test_a_device_has_the_tables_that_it_was_told_of():
    """At addresses that never change; before the first plan there is no work."""
    backend = make_cascade(cascade_config(max_num_seqs=6))
    before = backend.inputs(3, True)
    assert not any(table.any() for table in before)
    key, message = backend.plan([Sequence(Request([1] * 18_000 + [i])) for i in range(3)], is_new=True)
    backend.receive(message)
    assert (
        key is True and before.prefix_lens[:3].tolist() == [18_000] * 3 and before.num_work_items.item() > 0
    )
    for table, same in zip(before, backend.inputs(3, True), strict=True):
        assert table.data_ptr() == same.data_ptr() and table.shape == same.shape
    key, message = backend.plan([Sequence(Request([1] * 18_000 + [i])) for i in range(2)], is_new=True)
    backend.receive(message)
    assert before.prefix_lens[:3].tolist() == [18_000] * 2 + [0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=257, num_hidden_layers=1))


def make_requests() -> list[list[int]]:
    """Some with a document, some with a system prompt in front of it, some alone."""
    pick = random.Random(3)
    system, first, second = ([pick.randrange(256) for _ in range(length)] for length in (70, 60, 43))
    shared = [system + first] * 4 + [system + second] * 3 + [system] * 2 + [[]] * 2
    prompts = [begin + [pick.randrange(256) for _ in range(pick.randrange(1, 9))] for begin in shared]
    return [*prompts, prompts[0], prompts[0][:-1]]


def answers(folder: str, abort=False, n=1, overlap=False, **options) -> tuple[list[list[int]], dict]:
    with LLM(folder, **EXACT | dict(max_num_seqs=16, seed=0) | options) as llm:
        llm._overlap = overlap
        params = [
            SamplingParams(temperature=0, max_tokens=6 + 3 * (i % 5), ignore_eos=True) for i in range(13)
        ]
        prompts = make_requests()
        if abort:
            ids = [llm.add_request(*request) for request in zip(prompts, params, strict=True)]
            results, steps = {}, 0
            while not llm.is_finished():
                results |= dict(llm.step()[0])
                steps += 1
                if steps in (4, 6):
                    llm.abort(ids[steps // 2])
            kept = [results[i] for place, i in enumerate(ids) if place not in (2, 3)]
            return kept, llm.stats()
        for one in params:
            object.__setattr__(one, "n", n)
        results = llm.generate(prompts, params, use_tqdm=False)
        completions = [c for result in results for c in result.get("completions", [result])]
        return [completion["token_ids"] for completion in completions], llm.stats()


CASES = {
    "plain": {},
    "torch": dict(attention_backend="torch"),
    "large blocks": dict(kvcache_block_size=64),
    "chunked": dict(max_num_batched_tokens=50),
    "few rows": dict(max_num_seqs=5),
    "preempted": dict(num_kvcache_blocks=24, overlap=True),
    "aborted": dict(abort=True),
    "overlapping": dict(overlap=True),
    "completions": dict(n=3),
    "ranks": dict(tensor_parallel_size=2),
    "8-bit": dict(kv_cache_dtype="int8", n=3),
    "8-bit, preempted": dict(kv_cache_dtype="int8", num_kvcache_blocks=24, overlap=True),
}


@pytest.mark.parametrize("case", [slow(case) if "ranks" in case else case for case in CASES])
def test_answers_are_those_of_sequences_that_read_alone(folder, monkeypatch, no_forecast, case):
    for name, value in dict(
        MIN_SHARED_TOKENS=8, MIN_PREFIX_SAVED=8, MIN_SAVED_TOKENS=64, MIN_ITEM_TOKENS=32, ITEM_STEP=16
    ).items():
        monkeypatch.setattr(module, name, value)
    alone, stats = answers(folder, enable_prefix_caching=False, **CASES[case])
    assert not stats["num_grouped_tokens"]
    together, stats = answers(folder, **CASES[case])
    assert together == alone
    assert stats["num_grouped_tokens"] > 1000
    if "preempted" in case:
        assert stats["num_preemptions"]
