"""A simulated engine: the real Scheduler and BlockManager over a fake model, through random histories.

`python tests/simulation.py --steps 1000000 --seed 0` runs that many steps and says what happened in them.
The fake model's next token depends on every token before it, and each slot of its KV cache holds a hash of
all tokens up to the one written there: a wrong slot, a stale block or a lost token ends in a wrong read.

Progress, which every request's end is checked against (`Simulation.bound`): requests are admitted in order
of arrival, and the oldest running one is preempted last, so each decode step brings it one token nearer its
end. While a request is under way the oldest running one did not arrive after it; so there are at most D
decode steps until it ends, where D is the sum of `max_tokens` over the requests that it found there and its
own. Every other step is a prefill, of which an admission takes at most C = ceil(max_model_len / budget).
There are at most as many admissions as requests that were there or came meanwhile, plus one for each
preemption; and a decode step preempts fewer than max_num_seqs. So it takes no more than D + C * (requests +
D * (max_num_seqs - 1)) steps: no request starves and no preemption goes on for ever.
"""

import argparse
import random
import time
from collections import Counter
from types import SimpleNamespace

from test_block_manager import check_pool

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

PRIME = (1 << 61) - 1
VOCAB = 4
STOP_TEXT = "the tokens 2 3"


def extend(state: int, token: int) -> int:
    """A hash of all tokens so far, which takes the place of a position's keys and values."""
    return (state * 1_000_003 + token + 1) % PRIME


def next_token(state: int) -> int:
    return (state >> 7) % VOCAB


def expected_completion(prompt: list[int], params: SamplingParams, eos: frozenset[int]) -> list[int]:
    state, tokens = 0, []
    for token in prompt:
        state = extend(state, token)
    while len(tokens) < params.max_tokens:
        tokens.append(next_token(state))
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
            tokens.append(next_token(states[end - 1]))
            if end == len(states):
                states.append(extend(states[-1], tokens[-1]))
        return tokens


class Simulation:
    """One engine with random sizes and its users, all of them decided by `pick`, a random.Random."""

    def __init__(self, pick: random.Random, counts: Counter | None = None):
        self.pick, self.counts = pick, Counter() if counts is None else counts
        self.block_size, num_blocks = pick.randint(2, 4), pick.randint(2, 14)
        # The last token of a sequence needs no place in the cache.
        self.max_model_len = min(num_blocks * self.block_size + 1, pick.choice([12, 30, 60]))
        self.overlap = pick.random() < 0.5
        self.max_num_seqs, self.budget = pick.randint(1, 6), pick.randint(3, 30)
        self.scheduler = Scheduler(
            SimpleNamespace(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.budget,
                max_model_len=self.max_model_len,
                eos=pick.choice([(), (0,), 0, (0, 1)]),
                num_kvcache_blocks=num_blocks,
                kvcache_block_size=self.block_size,
                enable_prefix_caching=pick.random() < 0.8,
            )
        )
        self.model = FakeModel(self.block_size)
        self.step_number = self.num_arrived = 0
        self.requests: dict[int, Sequence] = {}  # unfinished, by seq_id, in order of arrival
        self.expected: dict[int, list[int]] = {}
        self.bounds: dict[int, tuple[int, int, int]] = {}  # by seq_id: see `bound`
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
        prompt = list(pick.choice(self.prompts))[: pick.randint(0, self.max_model_len)]
        prompt += [pick.randrange(VOCAB) for _ in range(pick.randint(1, 8))]
        prompt = prompt[: self.max_model_len - 1]
        params = SamplingParams(
            0,
            pick.randint(1, self.max_model_len - len(prompt)),
            ignore_eos=pick.random() < 0.5,
            stop_token_ids=pick.choice([(), (), (1,), (2, 3)]),
            stop=pick.choice([(), (), STOP_TEXT]),
        )
        group = [Sequence(prompt, params, self.block_size) for _ in range(pick.choice([1, 1, 1, 2, 4]))]
        if pick.random() < 0.1:
            group[0].scored_token_ids = prompt[1:]
        for seq in group:
            self.scheduler.add(seq)
            seq.leader = group[0] if seq is not group[0] else None
            self.requests[seq.seq_id] = seq
            self.num_arrived += 1
            work = sum(other.max_tokens for other in self.requests.values())
            self.bounds[seq.seq_id] = work, self.step_number, self.num_arrived - len(self.requests)
            self.expected[seq.seq_id] = expected_completion(prompt, params, self.scheduler.eos)
        self.counts["requests"] += len(group)
        self.counts["completions of the same prompt"] += len(group) - 1

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq)
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
            work, _, _ = self.bounds[seq.seq_id]
            self.bounds[seq.seq_id] = work, self.step_number, self.num_arrived - len(self.requests)
        self.check()
        self.counts["failures"] += 1

    def ask_too_much(self) -> None:
        length = self.pick.randint(1, self.max_model_len)
        waiting = list(self.scheduler.waiting)
        try:
            self.scheduler.add(Sequence([1] * length, SamplingParams(0, self.max_model_len - length + 1)))
        except ValueError:
            assert list(self.scheduler.waiting) == waiting
            self.counts["refused"] += 1
        else:
            raise AssertionError("took a request that can never fit")

    # --- what the engine does, see LLMEngine.step ---

    def step(self) -> None:
        self.step_number += 1
        preemptions = self.scheduler.num_preemptions
        sequences, is_prefill = self.scheduler.schedule()
        preemptions = self.scheduler.num_preemptions - preemptions
        step = None
        if sequences:
            assert len(sequences) <= self.max_num_seqs and (not is_prefill or not preemptions)
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

    def record(self, sequences: list[Sequence], tokens: list[int], drawing: list[Sequence]) -> None:
        finished = self.scheduler.postprocess(sequences, tokens, drawing)
        for seq in drawing:
            stops = seq.seq_id in self.requests and seq.sampling_params.stop
            if stops and seq.completion_token_ids[-2:] == [2, 3]:
                finished += [] if seq in finished else [seq]
                self.scheduler.stop(seq, STOP_TEXT)
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
        took, bound = self.step_number - self.bounds[seq.seq_id][1], self.bound(seq)
        assert took <= bound, f"{seq} took {took} steps, more than {bound}"
        self.counts["longest share of the bound, in percent"] = max(
            self.counts["longest share of the bound, in percent"], 100 * took // bound
        )
        self.prompts = [*self.prompts[-7:], seq.token_ids]

    def bound(self, seq: Sequence) -> int:
        """The most steps that a request may take (see above); tokens are known one step late at the most."""
        work, _, arrived_before = self.bounds[seq.seq_id]
        num_requests = self.num_arrived - arrived_before
        chunks = -(-self.max_model_len // self.budget)
        return work + chunks * (num_requests + work * (self.max_num_seqs - 1)) + 2

    # --- what must hold at every moment ---

    def check(self) -> None:
        scheduler, requests = self.scheduler, list(self.requests.values())
        check_pool(scheduler.block_manager, [seq.block_table for seq in requests])
        running, waiting = scheduler.running, list(scheduler.waiting)
        assert all(seq.status is SequenceStatus.RUNNING and seq.row >= 0 for seq in running)
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
