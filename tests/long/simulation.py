"""A simulated engine: the real Scheduler, BlockManager, BatchMaker and CascadePlanner over a fake device.

`python tests/long/simulation.py --steps 1000000 --seed 0` runs that many steps of random histories and says
what happened in them. The next token depends on the seed, the position and every token before it, and each
slot of the KV cache holds a hash of all tokens up to the one written there: a wrong slot, a stale block, a
wrong copy or a lost token ends in a wrong read. A shared prefix is read through the block table of one of its
sequences: it must be what each would have read in its own.

What is shared is checked against a search of the whole cache (`WatchedBlocks`): a prompt takes over every
token but its last that it has in common with what earlier steps computed, and whole blocks of what its own
step computes. What is copied was computed before, and its block is not handed out before the copy. A prompt
is held back once at most, for WAIT_TOKENS tokens at least that its step computes.

Progress, which every request's end is checked against (`Simulation.bound`): requests are admitted in order
of arrival, and the oldest running one is preempted last. It draws a token in each decode step and at the end
of its prompt. If somebody can decode, there are at most MAX_PREFILLS_IN_A_ROW steps before the next decode
step; if nobody can, the oldest is alone and its prompt is computed in at most C = ceil(max_model_len /
budget) steps. So the oldest draws a token every MAX_PREFILLS_IN_A_ROW + C steps at the latest. While a
request is under way, the oldest running one did not arrive after it, except for those that overtook it in the
one step in which it was held back. So it takes no more than D * (MAX_PREFILLS_IN_A_ROW + C) steps, where D is
the sum of what the requests that it found there, those that overtook it and itself may draw: nobody starves,
whoever comes later, and no preemption goes on for ever. Where no request may end early the lengths are known,
and nobody is preempted at all.
"""

import argparse
import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import paths  # noqa: F401
import torch
from block_pool import check_pool
from scheduling import ReadingScheduler

from nanovllm.engine.batch import Batch, BatchMaker
from nanovllm.engine.block_manager import BlockManager, Hit, PrefixCache
from nanovllm.engine.scheduler import MAX_PREFILLS_IN_A_ROW
from nanovllm.engine.sequence import Request, Sequence, SequenceStatus
from nanovllm.engine.slots import BLOCK_TABLE, SlotLayout
from nanovllm.extensions.logits.bias import BiasProcessor
from nanovllm.extensions.logits.scores import ScoreProcessor
from nanovllm.extensions.prefixes import planner, token_prefixes
from nanovllm.extensions.prefixes.cascade import CascadeBackend
from nanovllm.extensions.prefixes.planner import CascadePlanner
from nanovllm.extensions.prefixes.token_prefixes import HoldBack, TokenPrefixes
from nanovllm.extensions.safety.admission import AdmissionControl
from nanovllm.layers.attention import AttentionBackend
from nanovllm.sampling_params import SamplingParams

PRIME = (1 << 61) - 1
VOCAB = 4
STOP_TEXT = "the tokens 2 3"


def extend(state: int, token: int) -> int:
    """A hash of all tokens so far, which takes the place of a position's keys and values."""
    return (state * 1_000_003 + token + 1) % PRIME


def states_of(token_ids: list[int]) -> list[int]:
    """The hash after each of the tokens."""
    states = [0]
    for token in token_ids:
        states.append(extend(states[-1], token))
    return states[1:]


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def next_token(seed: int, position: int, state: int) -> int:
    return (extend(extend(state, position), seed) >> 7) % VOCAB


def expected_completion(
    prompt: list[int], params: SamplingParams, eos: frozenset[int], seed: int, most: int
) -> list[int]:
    """most: tokens of prompt and completion together."""
    state, tokens = states_of(prompt)[-1], []
    while len(tokens) != params.max_tokens and len(prompt) + len(tokens) < most:
        tokens.append(next_token(seed, len(prompt) + len(tokens), state))
        state = extend(state, tokens[-1])
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
        if tokens[-1] in ends or (params.stop and tokens[-2:] == [2, 3]):
            break
    return tokens


class FakeModel:
    """
    A device: computes batches, of which it knows no more than they and the tables say. It knows the tokens
    that it drew before the host does.
    """

    def __init__(self, config: Any, backend: CascadeBackend, prefix_cache: TokenPrefixes, processors: tuple):
        self.block_size, self.prefix_cache, self.backend = config.kvcache_block_size, prefix_cache, backend
        parts = SimpleNamespace(prefix_cache=prefix_cache, logits_processors=processors)
        self.batches = BatchMaker(config, parts, backend)
        layout, self.reach = SlotLayout(config), config.hf_config.tokens_in_reach
        self.words = np.zeros(layout.batch + layout.num_slots, np.int32)
        self.batch, rows = self.words[layout.batch :], self.words[: layout.batch].reshape(-1, layout.width)
        self.lengths, self.block_tables = rows[:, 3], rows[:, BLOCK_TABLE:]
        self.slots: dict[int, int] = {}
        self.states: dict[int, list[int]] = {}  # by seq_id: the hash after each of its tokens

    def reset(self) -> None:
        """What a failed step did is unknown."""
        self.batches.reset()
        self.words[:] = 0
        self.slots.clear()

    def run(self, sequences: list[Sequence], is_prefill: bool) -> tuple[list[int], int]:
        """Returns the next tokens, and how many were read as shared prefixes."""
        states = list(map(self.states_of, sequences))
        copied = [(seq, copy) for seq in sequences if (copy := self.copy_for(seq))]
        batch = self.batches.prefill(sequences) if is_prefill else self.batches.decode(sequences)
        if batch.slot_updates is not None:
            indices, values = batch.slot_updates
            self.words[indices] = values
        messages, num_grouped = batch.messages, self.backend.planner.num_prefix_tokens
        if (message := messages.get("attention")) is not None:
            self.backend.receive(message)
        rows = batch.slots if is_prefill else self.batch[: len(sequences)]
        tables, ends = self.block_tables[rows], np.array(batch.lens_k) if is_prefill else self.lengths[rows]
        assert (self.lengths[rows] == ends).all()
        starts = ends - (np.array(batch.lens_q) if is_prefill else 1)
        self.lengths[rows] = ends + 1
        assert starts.tolist() == [seq.num_computed_tokens for seq in sequences]
        assert (ends - starts).tolist() == [seq.num_scheduled_tokens for seq in sequences]
        self.copy(batch, copied)
        slots = list(map(self.slots_of, tables, starts, ends))
        assert not is_prefill or batch.slot_mapping.tolist() == sum(slots, [])
        for written, known, start, end in zip(slots, states, starts, ends, strict=True):
            self.slots.update(zip(written, known[start:end], strict=True))
        tokens, shared = [], self.read_prefixes(batch, tables, ends)
        for seq, known, table, end, read in zip(sequences, states, tables, ends, shared, strict=True):
            # Of a window, what the first token of the step sees and all behind it.
            first = max(0, seq.num_computed_tokens + 1 - self.reach) if self.reach else 0
            read += [self.slots[slot] for slot in self.slots_of(table, first + len(read), end)]
            assert read == known[first:end], f"{seq} reads what it did not write"
            tokens.append(next_token(seq.request.seed, int(end), known[end - 1]))
            if end == len(known):
                known.append(extend(known[-1], tokens[-1]))
        return tokens, 0 if is_prefill else num_grouped

    def states_of(self, seq: Sequence) -> list[int]:
        states = self.states.setdefault(seq.seq_id, [])
        for token in seq.token_ids[len(states) :]:
            states.append(extend(states[-1] if states else 0, token))
        assert len(states) == len(seq), "tokens that nobody drew"
        return states

    def slots_of(self, table: np.ndarray, start: int, end: int) -> list[int]:
        """Where the tokens start..end lie."""
        places = np.arange(start, end)
        return (table[places // self.block_size] * self.block_size + places % self.block_size).tolist()

    def copy_for(self, seq: Sequence) -> tuple[int, int, int] | None:
        """From which block to which, and how many tokens."""
        copies = getattr(self.prefix_cache, "copies", ())
        table = seq.block_table[seq.num_cached_blocks :]
        if not table or seq.num_released_blocks > seq.num_cached_blocks:  # it may be another's target by now
            return None
        return next((copy for copy in copies if copy[1] == table[0]), None)

    def copy(self, batch: Batch, sequences: list[tuple[Sequence, tuple[int, int, int]]]) -> None:
        """All at once, in any order, before anything else that the step does."""
        message = batch.messages.get("prefix_cache")
        copies = [] if message is None else message.tolist()
        assert copies == [list(copy) for _, copy in sequences]
        copied: dict[int, int] = {}
        for seq, (source, target, num_tokens) in sequences:
            start, end = seq.num_computed_tokens - num_tokens, seq.num_computed_tokens
            assert start < end and start % self.block_size == 0, "not the beginning of a block"
            assert self.copy_for(seq) is None and seq.block_table[start // self.block_size] == target
            read = [self.slots.get(source * self.block_size + i) for i in range(num_tokens)]
            assert read == self.states[seq.seq_id][start:end], "copied what no earlier step computed"
            written = {target * self.block_size + i: state for i, state in enumerate(read)}
            assert not written.keys() & copied.keys(), "copied twice to the same place"
            copied.update(written)
        self.slots.update(copied)

    def read_prefixes(self, batch: Batch, tables: np.ndarray, ends: np.ndarray) -> list[list[int]]:
        """What work items read for each sequence of the batch, see CascadePlan."""
        size = batch.num_sequences
        if not batch.plan_key:
            return [[] for _ in range(size)]
        whole, plan = self.backend.tables, self.backend.inputs(size, True)
        assert not whole.prefix_lens[size:].any() and not whole.num_partials[size:].any(), "padding reads"
        assert plan.num_work_items[0] <= len(plan.work_items)
        found: dict[int, tuple[int, int, list[int]]] = {}
        queries = plan.queries.tolist()
        for first, count, begin, end in plan.work_items[: plan.num_work_items[0]].tolist():
            states = [self.slots[slot] for slot in self.slots_of(tables[queries[first]], begin, end)]
            for query in range(first, first + count):
                assert query not in found, "two work items have the same query"
                found[query] = queries[query], begin, states
        read: list[list[int]] = []
        for row, partials in enumerate(plan.partials[: len(ends)]):
            mine: list[int] = []
            for owner, begin, states in sorted(found[i] for i in partials[: plan.num_partials[row]].tolist()):
                assert owner == row and begin == len(mine), "not its own result, a gap or an overlap"
                mine += states
            assert len(mine) == plan.prefix_lens[row] < ends[row], "beyond its own tokens"
            read.append(mine)
        assert sum(map(len, read)) == self.backend.planner.num_prefix_tokens
        return read


class WatchedBlocks(BlockManager):
    """
    The real one. Beside it, by brute force: what each block holds (`model.slots`, emptied when a block is
    handed out) and how much of that must be found.
    """

    def __init__(self, simulation: "Simulation", *sizes: Any):
        self.simulation, self.slots = simulation, simulation.model.slots
        super().__init__(*sizes)
        self.real_find, self.prefix_cache.find = self.prefix_cache.find, self.find

    def reset(self) -> None:
        super().reset()
        self.given_back = [0] * self.num_blocks  # by block: tokens that could be found when it was given back
        self.num_prefilled: dict[int, int] = {}  # by seq_id: its tokens when it was admitted
        self.gains: dict[int, int] = {}  # by seq_id: tokens that it could copy after this step, but not now
        self.sources: set[int] = set()  # of this step's copies

    def find(self, seq: Sequence) -> Hit:
        hit = self.real_find(seq)
        computing = max(self.simulation.computing(seq), default=0) if self.enable_prefix_caching else 0
        self.gains[seq.seq_id] = computing - hit.num_tokens
        return hit

    def allocate(self, seq: Sequence, hit: Hit | None = None) -> None:
        counts, size = self.simulation.counts, self.block_size
        most = self.most_in_common(seq) if self.enable_prefix_caching else 0
        super().allocate(seq, hit)
        self.num_prefilled[seq.seq_id] = len(seq)
        copy = self.simulation.model.copy_for(seq)
        num_copied = copy[2] if copy else 0
        assert seq.num_cached_tokens == seq.num_computed_tokens < len(seq)
        num_blocks, rest = divmod(seq.num_cached_tokens - num_copied, size)
        assert rest == 0 and num_blocks == most // size, "not all whole blocks are shared"
        if num_copied:
            self.sources.add(copy[0])
            counts["copies"] += 1
        if num_copied < most % size:
            assert not num_copied and not self.free_block_ids, "not all common tokens are copied"
            counts["copies for which no block was free"] += 1
        assert num_copied <= most % size, "copies more than is in common"
        is_long = self.gains[seq.seq_id] >= self.simulation.wait_tokens
        assert seq in self.simulation.have_waited or not is_long, "computes what others of its step compute"
        for block_id in seq.block_table[num_blocks:]:
            self.hand_out(block_id)

    def may_append(self, seq: Sequence) -> None:
        num_blocks = len(seq.block_table)
        super().may_append(seq)
        for block_id in seq.block_table[num_blocks:]:
            self.hand_out(block_id)

    def hand_out(self, block_id: int) -> None:
        assert block_id not in self.sources, "handed out, but still to be copied from"
        self.given_back[block_id] = 0
        for i in range(self.block_size):
            self.slots.pop(block_id * self.block_size + i, None)

    def deallocate(self, seq: Sequence) -> None:
        table, num_tokens = list(seq.block_table), min(seq.num_computed_tokens, len(seq.token_ids))
        num_released = seq.num_released_blocks
        super().deallocate(seq)
        for i, block_id in [*enumerate(table)][num_released:]:
            here = min(num_tokens - i * self.block_size, self.block_size)
            self.given_back[block_id] = max(self.given_back[block_id], here)

    def release(self, seq: Sequence, end: int) -> None:
        first = seq.num_released_blocks
        super().release(seq, end)
        for block_id in seq.block_table[first:end] if end < len(seq.block_table) else ():
            self.given_back[block_id] = self.block_size
            self.simulation.counts["released blocks"] += 1

    def most_in_common(self, seq: Sequence) -> int:
        """How many of the sequence's tokens, from the first one but without the last, are to be found."""
        size, num_tokens = self.block_size, 0
        states = states_of(seq.token_ids)[: self.prefix_cache.max_cached(seq)]
        blocks, computing = self.contents(), self.contents_of_this_step()
        while True:
            states_here = states[num_tokens : num_tokens + size]
            most = max(num_common(states_here, block) for block in blocks)
            if most < size and states_here not in computing:
                return num_tokens + most
            num_tokens += size

    def contents(self) -> list[list[int]]:
        """
        The hashes of tokens that are to be found in each block: all that are known and computed where the
        block is full or was given back, else those that it had when admitted, once all are computed.
        """
        size, num_tokens = self.block_size, list(self.given_back)
        for seq in self.simulation.scheduler.running:
            computed = min(seq.num_computed_tokens, len(seq.token_ids))
            num_prefilled = self.num_prefilled[seq.seq_id]
            num_open = num_prefilled if computed >= num_prefilled else 0
            for i, block_id in [*enumerate(seq.block_table)][seq.num_released_blocks :]:
                here = size if (i + 1) * size <= computed else num_open - i * size
                num_tokens[block_id] = max(num_tokens[block_id], here)
        return [
            [self.slots[i] for i in range(block * size, block * size + count) if i in self.slots]
            for block, count in enumerate(num_tokens)
        ]

    def contents_of_this_step(self) -> list[list[int]]:
        """The same of whole blocks that this step computes."""
        size, found = self.block_size, []
        for seq in self.simulation.scheduler.running:
            if seq.num_scheduled_tokens:
                end = (seq.num_computed_tokens + seq.num_scheduled_tokens) // size * size
                states = states_of(seq.token_ids[:end])
                found += [states[i : i + size] for i in range(0, end, size)]
        return found


class Simulation:
    """One engine with random sizes and its users, all of them decided by `pick`, a random.Random."""

    def __init__(self, pick: random.Random, counts: Counter | None = None):
        self.pick, self.counts = pick, Counter() if counts is None else counts
        self.block_size, num_blocks = pick.choice([2, 3, 4, 4, 8, 16]), pick.randint(2, 14)
        self.max_model_len = pick.choice([12, 30, 60])
        # The last token of a sequence needs no place in the cache.
        self.max_num_tokens = min(num_blocks * self.block_size + 1, self.max_model_len)
        self.exact = pick.random() < 0.2  # no request may end before its max_tokens
        self.is_forecast_wrong = pick.random() < 0.6  # others are expected to end at once
        self.overlap = pick.random() < 0.5
        self.wait_tokens = pick.choice([1, 2, 3, 5, 64])
        self.max_num_seqs, self.budget = pick.randint(1, 8), pick.choice([1, 2, 3, pick.randint(3, 30)])
        config = SimpleNamespace(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            eos=pick.choice([(), (0,), (0,), (0, 1)]),
            num_kvcache_blocks=num_blocks,
            kvcache_block_size=self.block_size,
            enable_prefix_caching=pick.random() < 0.8,
            hf_config=SimpleNamespace(
                context_limit=100,
                vocab_size=VOCAB,
                num_attention_heads=1,
                num_key_value_heads=1,
                tokens_in_reach=pick.choice([0, 0, 0, 1, 2, 5, 12]),
            ),
            model="a model",
            attention_backend="auto",
            tensor_parallel_size=1,
        )
        step = pick.choice([1, 2, 3])
        self.limits = {
            "MIN_SHARED_TOKENS": pick.randint(1, 4),
            "MIN_SAVED_TOKENS": pick.choice([1, 9, 30]),
            "MIN_PREFIX_SAVED": 1,
        }
        self.limits |= {"ITEM_STEP": step, "MIN_ITEM_TOKENS": 2 * step}
        cpu = torch.device("cpu")
        backend = CascadeBackend(AttentionBackend(), config)
        backend.allocate(cpu)
        sizes = pick.choice([1, 2, 3, 64]), pick.choice([1, 4, 20])
        backend.planner = CascadePlanner(backend.planner.num_rows, *sizes)
        prefix_cache = TokenPrefixes() if config.enable_prefix_caching else PrefixCache()
        self.scores = ScoreProcessor()
        self.model = FakeModel(config, backend, prefix_cache, (self.scores,))
        admissions = hold_back, self.forecast = HoldBack(), AdmissionControl(config, BiasProcessor())
        self.have_waited = hold_back.have_waited
        prefix_cache.max_cached = self.scores.max_cached
        self.scheduler = ReadingScheduler(config, prefix_cache, admissions)
        self.scheduler.block_manager = WatchedBlocks(
            self, num_blocks, self.block_size, config.enable_prefix_caching, prefix_cache
        )
        self.step_number = 0
        self.requests: dict[int, Sequence] = {}  # unfinished, by seq_id, in order of arrival
        self.expected: dict[int, list[int]] = {}
        self.work: dict[int, int] = {}  # by seq_id: D (see above)
        self.arrived: dict[int, int] = {}  # by seq_id: in which step
        self.held_back: set[int] = set()  # seq_ids
        self.num_waited = 0  # prefill steps since somebody who can decode last did
        self.prompts: list[list[int]] = [[]]  # of some earlier requests, with completions
        self.under_way: tuple | None = None

    def run(self, num_steps: int) -> None:
        wait = patch.object(token_prefixes, "WAIT_TOKENS", self.wait_tokens)
        with wait, patch.multiple(planner, **self.limits):
            for _ in range(num_steps):
                self.users_act()
                self.step()
            while self.requests or self.under_way:
                self.step()
        self.check()
        assert not self.scheduler.block_manager.used_block_ids and self.scheduler.is_finished()

    # --- what users do ---

    def users_act(self) -> None:
        chance = self.pick.random()
        if chance < 0.2 and len(self.requests) < 20:
            beginning = self.pick.choice(self.prompts)
            for _ in range(self.pick.choice([1, 1, 1, 3])):
                self.arrive(beginning)
                beginning = self.prompts[-1]
        elif chance < 0.29 and self.requests:
            self.abort(self.pick.choice(list(self.requests.values())))
        elif chance < 0.292:
            self.scheduler.clear()
            self.model.reset()
            self.requests.clear()
            self.under_way = None
            self.counts["clears"] += 1
        elif chance < 0.297:
            self.ask_too_much()
        elif chance < 0.302:
            self.fail()

    def arrive(self, beginning: list[int]) -> None:
        pick = self.pick
        prompt = beginning[: pick.randint(0, self.max_num_tokens)]
        prompt += [pick.randrange(VOCAB) for _ in range(pick.randint(1, 8))]
        prompt = prompt[: self.max_num_tokens - 1]
        room = self.max_num_tokens - len(prompt)
        max_tokens, ends = pick.choice([pick.randint(1, room)] * 8 + [room + pick.randint(1, 99), None]), {}
        if not self.exact:
            ends = dict(
                ignore_eos=pick.random() < 0.5,
                stop_token_ids=pick.choice([(), (), (1,), (2, 3)]),
                stop=pick.choice([(), (), STOP_TEXT]),
            )
        params = SamplingParams(0, max_tokens, **{"ignore_eos": True, **ends})
        seeds = [pick.getrandbits(63) for _ in range(pick.choice([1, 1, 1, 2, 4]))]
        group = [Sequence(Request(prompt, params, self.block_size, seed)) for seed in seeds]
        if pick.random() < 0.1:
            group[0].wanted, group[0].own = 1, {"scores": self.scores.scoring(prompt[1:])}
        self.prompts = [*self.prompts[-7:], prompt]
        for seq in group:
            self.scheduler.add(seq)
            self.requests[seq.seq_id] = seq
            self.work[seq.seq_id] = sum(map(self.most_drawn, self.requests.values()))
            self.arrived[seq.seq_id] = self.step_number
            self.expected[seq.seq_id] = expected_completion(
                prompt, params, self.scheduler.prompts.eos, seq.request.seed, self.max_num_tokens
            )
        self.counts["requests"] += len(group)
        self.counts["ended by the context"] += (max_tokens or room + 1) > room
        self.counts["completions of the same prompt"] += len(group) - 1

    def abort(self, seq: Sequence) -> None:
        self.scheduler.end(seq, "abort")
        self.end(seq)
        assert seq.finish_reason == "abort"
        self.counts["aborts"] += 1

    def fail(self) -> None:
        """A step that was to be computed next fails: all begin anew with the tokens that are known."""
        waiting = list(self.scheduler.waiting)
        self.scheduler.schedule()
        self.note_overtaking(waiting)
        self.under_way = None
        self.scheduler.clear(self.requests.values())
        self.model.reset()
        self.scores.reset()
        for seq in self.requests.values():
            del self.model.states.get(seq.seq_id, [])[len(seq) :]
            self.work[seq.seq_id] = sum(map(self.most_drawn, self.requests.values()))
            self.arrived[seq.seq_id] = self.step_number
        self.check()
        self.counts["failures"] += 1

    def ask_too_much(self) -> None:
        length = self.max_num_tokens + self.pick.randint(0, 3)
        waiting = list(self.scheduler.waiting)
        try:
            self.scheduler.add(Sequence(Request([1] * length, SamplingParams(0, self.pick.randint(1, 9)))))
        except ValueError:
            assert list(self.scheduler.waiting) == waiting
            self.counts["refused"] += 1
        else:
            raise AssertionError("took a request that can never fit")

    # --- what the engine does, see LLMEngine.step ---

    def step(self) -> None:
        self.step_number += 1
        preemptions, chunked = self.scheduler.num_preemptions, self.scheduler.chunked
        if self.is_forecast_wrong:
            self.forecast.share = 0.0
        waiting = list(self.scheduler.waiting)
        can_decode = any(seq is not self.scheduler.chunked for seq in self.scheduler.running)
        sequences, is_prefill = self.scheduler.schedule()
        preemptions = self.scheduler.num_preemptions - preemptions
        step = None
        if sequences:
            assert len(sequences) <= self.max_num_seqs and (not is_prefill or not preemptions)
            assert not self.exact or not preemptions, "preempted though all lengths are known"
            self.num_waited = self.num_waited + 1 if is_prefill and can_decode else 0
            assert self.num_waited <= MAX_PREFILLS_IN_A_ROW, "kept from decoding"
            self.note_overtaking(waiting)
            if is_prefill:
                assert self.scheduler.chunked in (None, *sequences[:1]), "a chunk beside others"
                assert sum(seq.num_scheduled_tokens for seq in sequences) <= self.budget
            tokens, num_grouped = self.model.run(sequences, is_prefill)
            self.counts["tokens read as shared prefixes"] += num_grouped
            self.scheduler.block_manager.sources.clear()
            step = sequences, tokens, self.scheduler.advance(sequences)
        else:
            assert self.under_way or not self.requests, "a step without work"
        self.check()
        if self.overlap:
            step, self.under_way = self.under_way, step
        if step is not None:
            self.record(*step)
        self.check()
        self.counts["steps"] += 1
        self.counts["prefills"] += is_prefill
        self.counts["preemptions"] += preemptions
        if chunked is not None and not is_prefill:
            self.counts["decode steps in the middle of a prompt"] += 1
            self.counts["preemptions in the middle of a prompt"] += self.scheduler.chunked is None

    def record(self, sequences: list[Sequence], tokens: list[int], drawing: list[Sequence]) -> None:
        finished = self.scheduler.postprocess(sequences, tokens, drawing)
        for seq in drawing:
            stops = seq.seq_id in self.requests and seq.sampling_params.stop
            if stops and seq.completion_token_ids[-2:] == [2, 3]:
                finished += [] if seq in finished else [seq]
                self.scheduler.end(seq, "stop", STOP_TEXT)
        for seq in finished:
            assert seq.completion_token_ids == self.expected[seq.seq_id], "not the tokens of the model"
            self.end(seq)
            self.counts["finished"] += 1
            self.counts["tokens"] += seq.num_completion_tokens
        for seq in drawing:
            done = seq.completion_token_ids
            assert done == self.expected[seq.seq_id][: len(done)]
            assert seq.is_finished or len(done) < len(self.expected[seq.seq_id]), "went on after its end"

    def end(self, seq: Sequence) -> None:
        assert seq.is_finished and not seq.block_table and seq.slot == -1 and len(seq) == len(seq.token_ids)
        del self.requests[seq.seq_id]
        took, bound = self.step_number - self.arrived[seq.seq_id], self.bound(seq)
        assert took <= bound, f"{seq} took {took} steps, more than {bound}"
        self.counts["longest share of the bound, in percent"] = max(
            self.counts["longest share of the bound, in percent"], 100 * took // bound
        )
        self.prompts = [*self.prompts[-7:], seq.token_ids]

    def bound(self, seq: Sequence) -> int:
        """The most steps that a request may take (see above); tokens are known one step late at the most."""
        chunks = -(-self.max_num_tokens // self.budget)
        return self.work[seq.seq_id] * (MAX_PREFILLS_IN_A_ROW + chunks) + 2

    def most_drawn(self, seq: Sequence) -> int:
        return seq.request.max_num_tokens - seq.num_prompt_tokens

    def note_overtaking(self, waiting: list[Sequence]) -> None:
        """A sequence that is admitted before an older one may draw tokens while that one waits."""
        gains = self.scheduler.block_manager.gains
        now = {seq.seq_id for seq in waiting if seq in self.have_waited} - self.held_back
        assert all(gains[seq_id] >= self.wait_tokens for seq_id in now), "held back for too little"
        self.held_back |= now
        self.counts["held back"] += len(now)
        last = max((i for i, seq in enumerate(waiting) if seq.slot >= 0), default=0)
        for i, seq in enumerate(waiting[:last]):
            if seq.slot < 0:
                assert seq.seq_id in now, "overtaken, but not held back in this step"
                self.counts["overtaken"] += 1
                self.work[seq.seq_id] += sum(self.most_drawn(s) for s in waiting[i:] if s.slot >= 0)

    def computing(self, seq: Sequence) -> list[int]:
        """Tokens but the last that it has in common with each that the step computes, up to a block of it."""
        step = [other for other in self.scheduler.running if other.num_scheduled_tokens]
        most = self.scheduler.block_manager.prefix_cache.max_cached(seq)
        common = [num_common(seq.token_ids[:most], other.token_ids) for other in step]
        first = [other.num_computed_tokens // self.block_size * self.block_size for other in step]
        return [num for num, start in zip(common, first, strict=True) if num >= start]

    # --- what must hold at every moment ---

    def check(self) -> None:
        scheduler, requests = self.scheduler, list(self.requests.values())
        check_pool(scheduler.block_manager, [seq.block_table[seq.num_released_blocks :] for seq in requests])
        running, waiting = scheduler.running, list(scheduler.waiting)
        assert all(seq.status is SequenceStatus.RUNNING and seq.slot >= 0 for seq in running)
        assert not any(seq.num_scheduled_tokens for seq in running), "scheduled, but not in the step"
        assert all(seq.status is SequenceStatus.WAITING and seq.slot == -1 for seq in waiting)
        assert all(not seq.block_table and not seq.num_computed_tokens for seq in waiting)
        rows = [seq.slot for seq in running]
        assert sorted(rows + scheduler.free_slots) == list(range(self.max_num_seqs))
        leaving = [seq for seq in requests if seq.slot == -1 and seq.status is SequenceStatus.RUNNING]
        is_at_end = [len(seq) == seq.request.max_num_tokens for seq in leaving]
        assert all(is_at_end), "without a row, but not at its end"
        assert sorted(seq.seq_id for seq in [*running, *waiting, *leaving]) == sorted(self.requests)
        first_come = [seq.seq_id for seq in [*running, *waiting] if seq.seq_id not in self.held_back]
        assert first_come == sorted(first_come), "overtaken by a younger one"
        new = [seq.seq_id for seq in waiting if seq.num_prompt_tokens_cached is None]
        assert new == sorted(new), "the queue is out of order"
        for seq in running:
            closed = (len(seq.token_ids) - 1) // self.block_size
            first = seq.num_released_blocks
            blocks = [scheduler.block_manager.blocks[i] for i in seq.block_table[first:]]
            if reach := scheduler.reach:
                assert first == max(0, seq.num_computed_tokens + 1 - reach) // self.block_size
            for i, block in enumerate(blocks, first):
                tokens = seq.block(i)[: len(block.token_ids)]
                assert block.token_ids == tokens, "a block of other tokens"
                assert (block.hash != -1) == (len(tokens) == self.block_size), "closed, but not full"
                assert block.ref_count == 1 or block.hash != -1, "an open block is shared"
            if scheduler.block_manager.enable_prefix_caching:
                assert all(block.hash != -1 for block in blocks[: max(0, closed - first)]), (
                    "a full block stays open"
                )


def simulate(seed: int, num_steps: int, counts: Counter) -> None:
    """So many steps and a few more, in histories of random length."""
    pick, target = random.Random(seed), counts["steps"] + num_steps
    while counts["steps"] < target:
        Simulation(pick, counts).run(pick.choice([20, 100, 500]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts, start = Counter(), time.perf_counter()
    simulate(args.seed, args.steps, counts)
    for name, count in counts.items():
        print(f"{count:12,} {name}")
    print(
        f"in {time.perf_counter() - start:,.0f} s; every request got the model's tokens, no rule was broken"
    )


if __name__ == "__main__":
    main()
