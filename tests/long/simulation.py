"""A simulated engine: the real Scheduler and BlockManager over a fake model, through random histories.

`python tests/long/simulation.py --steps 1000000 --seed 0` runs that many steps and says what happened in
them. The fake model's next token depends on the seed, the position and every token before it, and each slot
of its KV cache holds a hash of all tokens up to the one written there: a wrong slot, a stale block, a wrong
copy or a lost token ends in a wrong read.

Progress, which every request's end is checked against (`Simulation.bound`): requests are admitted in order
of arrival, and the oldest running one is preempted last. It draws a token in each decode step and at the end
of its prompt. If somebody can decode, there are at most MAX_PREFILLS_IN_A_ROW steps before the next decode
step; if nobody can, the oldest is alone and its prompt is computed in at most C = ceil(max_model_len /
budget) steps. So the oldest draws a token every MAX_PREFILLS_IN_A_ROW + C steps at the latest. While a
request is under way, the oldest running one did not arrive after it, except for completions that wait for the
first of their group to compute the prompt, which others may overtake. So it takes no more than D *
(MAX_PREFILLS_IN_A_ROW + C) steps, where D is the sum of what the requests that it found there, those that
overtook it and itself may draw: nobody starves, whoever comes later, and no preemption goes on for ever.
Where no request may end early the lengths are known, and nobody is preempted at all.
"""

import argparse
import random
import time
from collections import Counter
from types import SimpleNamespace

import paths  # noqa: F401
from test_block_manager import check_pool

from nanovllm.engine.scheduler import MAX_PREFILLS_IN_A_ROW, Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

PRIME = (1 << 61) - 1
VOCAB = 4
STOP_TEXT = "the tokens 2 3"


def extend(state: int, token: int) -> int:
    """A hash of all tokens so far, which takes the place of a position's keys and values."""
    return (state * 1_000_003 + token + 1) % PRIME


def next_token(seed: int, position: int, state: int) -> int:
    return (extend(extend(state, position), seed) >> 7) % VOCAB


def expected_completion(
    prompt: list[int], params: SamplingParams, eos: frozenset[int], seed: int, most: int
) -> list[int]:
    """most: tokens of prompt and completion together."""
    state, tokens = 0, []
    for token in prompt:
        state = extend(state, token)
    while len(tokens) != params.max_tokens and len(prompt) + len(tokens) < most:
        tokens.append(next_token(seed, len(prompt) + len(tokens), state))
        state = extend(state, tokens[-1])
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
        if tokens[-1] in ends or (params.stop and tokens[-2:] == [2, 3]):
            break
    return tokens


class FakeModel:
    """Computes what is scheduled; like a device it knows the tokens it drew before the host does."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.states: dict[int, list[int]] = {}  # by seq_id: the hash after each of its tokens

    def run(self, sequences: list[Sequence], is_prefill: bool) -> list[int]:
        size, slots, spans, written = self.block_size, self.slots, [], 0
        for seq in sequences:
            assert not seq.block_copies or seq.num_scheduled_tokens == 1, "copied, and yet computed"
            for source, target in seq.block_copies:
                slots.update({target * size + i: slots.get(source * size + i, -1) for i in range(size)})
            seq.block_copies = []
        for seq in sequences:
            states = self.states.setdefault(seq.seq_id, [])
            for token in seq.token_ids[len(states) :]:
                states.append(extend(states[-1] if states else 0, token))
            assert len(states) == len(seq), "tokens that nobody drew"
            start = seq.num_computed_tokens
            end = start + seq.num_scheduled_tokens
            assert start < end <= len(seq) and (is_prefill or end - start == 1)
            table = [block * size for block in seq.block_table]
            assert len(table) * size >= end
            spans.append((seq, states, table, end))
            new = {table[i // size] + i % size: states[i] for i in range(start, end)}
            slots.update(new)
            written += len(new)
        tokens = []
        for seq, states, table, end in spans:
            read = [slots[table[i // size] + i % size] for i in range(end)]
            assert read == states[:end], f"{seq} reads what it did not write"
            tokens.append(next_token(seq.seed, end, states[end - 1]))
            if end == len(states):
                states.append(extend(states[-1], tokens[-1]))
        return tokens


class Simulation:
    """One engine with random sizes and its users, all of them decided by `pick`, a random.Random."""

    def __init__(self, pick: random.Random, counts: Counter | None = None):
        self.pick, self.counts = pick, Counter() if counts is None else counts
        self.block_size, num_blocks = pick.randint(2, 4), pick.randint(2, 14)
        self.max_model_len = pick.choice([12, 30, 60])
        # The last token of a sequence needs no place in the cache.
        self.max_num_tokens = min(num_blocks * self.block_size + 1, self.max_model_len)
        self.exact = pick.random() < 0.2  # no request may end before its max_tokens
        self.is_forecast_wrong = pick.random() < 0.6  # others are expected to end at once
        self.overlap = pick.random() < 0.5
        self.max_num_seqs, self.budget = pick.randint(1, 6), pick.choice([1, 2, 3, pick.randint(3, 30)])
        self.scheduler = Scheduler(
            SimpleNamespace(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.budget,
                max_model_len=self.max_model_len,
                eos=pick.choice([(), (0,), 0, (0, 1)]),
                num_kvcache_blocks=num_blocks,
                kvcache_block_size=self.block_size,
                enable_prefix_caching=pick.random() < 0.8,
                hf_config=SimpleNamespace(context_limit=100),
            )
        )
        self.model = FakeModel(self.block_size)
        self.step_number = 0
        self.requests: dict[int, Sequence] = {}  # unfinished, by seq_id, in order of arrival
        self.expected: dict[int, list[int]] = {}
        self.work: dict[int, int] = {}  # by seq_id: D (see above)
        self.arrived: dict[int, int] = {}  # by seq_id: in which step
        self.num_waited = 0  # prefill steps since somebody who can decode last did
        self.prompts: list[list[int]] = [[]]  # of some earlier requests, with completions
        self.under_way: tuple | None = None

    def run(self, num_steps: int) -> None:
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
        if chance < 0.25 and len(self.requests) < 20:
            self.arrive()
        elif chance < 0.29 and self.requests:
            self.abort(self.pick.choice(list(self.requests.values())))
        elif chance < 0.292:
            self.scheduler.clear()
            self.requests.clear()
            self.under_way = None
            self.counts["clears"] += 1
        elif chance < 0.297:
            self.ask_too_much()
        elif chance < 0.302:
            self.fail()

    def arrive(self) -> None:
        pick = self.pick
        prompt = list(pick.choice(self.prompts))[: pick.randint(0, self.max_num_tokens)]
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
        group = [Sequence(prompt, params, self.block_size, seed) for seed in seeds]
        if pick.random() < 0.1:
            group[0].scored_token_ids = prompt[1:]
        for seq in group:
            self.scheduler.add(seq)
            seq.leader = group[0] if seq is not group[0] else None
            self.requests[seq.seq_id] = seq
            self.work[seq.seq_id] = sum(map(self.most_drawn, self.requests.values()))
            self.arrived[seq.seq_id] = self.step_number
            self.expected[seq.seq_id] = expected_completion(
                prompt, params, self.scheduler.limits.eos, seq.seed, self.max_num_tokens
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
        self.scheduler.schedule()
        self.under_way = None
        self.scheduler.restart(self.requests.values())
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
            self.scheduler.add(Sequence([1] * length, SamplingParams(0, self.pick.randint(1, 9))))
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
            self.scheduler.expected_share = 0.0
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
                assert sum(seq.num_scheduled_tokens for seq in sequences) <= self.budget
            tokens = self.model.run(sequences, is_prefill)
            for seq in sequences:
                seq.num_scored = len(seq.scored_token_ids)
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
        assert seq.is_finished and not seq.block_table and seq.row == -1 and len(seq) == len(seq.token_ids)
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
        return seq.max_num_tokens - seq.num_prompt_tokens

    def note_overtaking(self, waiting: list[Sequence]) -> None:
        """A sequence that is admitted before an older one may draw tokens while that one waits."""
        for i, seq in enumerate(waiting):
            if seq.row >= 0:
                for other in waiting[:i]:
                    if other.row < 0:
                        assert other.leader is not None, "overtaken by a younger one"
                        self.work[other.seq_id] += self.most_drawn(seq)

    # --- what must hold at every moment ---

    def check(self) -> None:
        scheduler, requests = self.scheduler, list(self.requests.values())
        check_pool(scheduler.block_manager, [seq.block_table for seq in requests])
        running, waiting = scheduler.running, list(scheduler.waiting)
        assert all(seq.status is SequenceStatus.RUNNING and seq.row >= 0 for seq in running)
        assert not any(seq.num_scheduled_tokens for seq in running), "scheduled, but not in the step"
        assert all(seq.status is SequenceStatus.WAITING and seq.row == -1 for seq in waiting)
        assert all(not seq.block_table and not seq.num_computed_tokens for seq in waiting)
        rows = [seq.row for seq in running]
        assert sorted(rows + scheduler.free_rows) == list(range(self.max_num_seqs))
        leaving = [seq for seq in requests if seq.row == -1 and seq.status is SequenceStatus.RUNNING]
        assert all(len(seq) == seq.max_num_tokens for seq in leaving), "without a row, but not at its end"
        assert sorted(seq.seq_id for seq in [*running, *waiting, *leaving]) == sorted(self.requests)
        first_come = [seq.seq_id for seq in [*running, *waiting] if seq.leader is None]
        assert first_come == sorted(first_come), "overtaken by a younger one"
        new = [seq.seq_id for seq in waiting if seq.num_prompt_tokens_cached is None]
        assert new == sorted(new), "the queue is out of order"
        for seq in running:
            closed = (len(seq.token_ids) - 1) // self.block_size
            blocks = [scheduler.block_manager.blocks[i] for i in seq.block_table]
            for i, block in enumerate(blocks):
                assert block.hash == -1 or block.token_ids == seq.block(i), "a block of other tokens"
                assert block.ref_count == 1 or block.hash != -1, "an open block is shared"
            if scheduler.block_manager.enable_prefix_caching:
                assert all(block.hash != -1 for block in blocks[:closed]), "a full block stays open"


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
