"""Random schedules of the same requests, whose logits are compared as bytes."""

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engines import Watch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.interfaces import LogitsProcessor

VOCAB_SIZE = 320
LONGEST = 154  # tokens of a prompt and its completion
SEVERAL = 3  # batches that an engine computes, each of which may find what the one before has left


class Request(NamedTuple):
    prompt: list[int]
    params: dict[str, Any]


class Recorder(LogitsProcessor):
    """Keeps the model's logits of every token, by request (in `extra`) and sequence."""

    name = "recorder"
    changes_logits = False

    def __init__(self) -> None:
        self.found: dict[Any, dict[int, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))

    def wants(self, params: SamplingParams) -> bool:
        return True

    def drawn(self, raw_logits, tokens, step) -> None:
        step.told[self.name] = (raw_logits.clone(),)

    def record(self, sequences, drawing, tensors) -> None:
        for seq, logits in zip(drawing, tensors[0].cpu(), strict=False):  # then chunks
            if not seq.is_finished:
                self.found[seq.sampling_params.extra][seq.seq_id].append(logits.view(torch.uint8))

    def take(self) -> dict[Any, list[bytes]]:
        """All logits of each request, one completion after the other."""
        found = {
            key: [b"".join(bytes(each.numpy()) for each in rows) for _, rows in sorted(sequences.items())]
            for key, sequences in self.found.items()
        }
        self.found.clear()
        return found


def make_requests(pick: random.Random, count: int) -> list[Request]:
    """Many begin alike, some are alike, some have several completions."""

    def tokens(low: int, high: int) -> list[int]:
        return [pick.randrange(VOCAB_SIZE) for _ in range(pick.randint(low, high))]

    beginnings = [tokens(40, 110) for _ in range(3)]
    requests = []
    for _ in range(count):
        begin = pick.choice(beginnings)
        prompt = pick.choice([begin[: pick.randint(1, len(begin))], begin, []]) + tokens(1, 30)
        if requests and pick.random() < 0.15:
            prompt = pick.choice(requests).prompt
        params = dict(max_tokens=pick.randint(1, 14), n=pick.choice([1, 1, 1, 2, 4]))
        params |= dict(temperature=pick.choice([0, 1.0]), seed=pick.randrange(99), ignore_eos=True)
        requests.append(Request(prompt, params))
    return requests


def generate(llm: LLM, requests: dict[int, Request], pick: random.Random | None = None) -> None:
    """All at once, or with `pick` some while others run."""
    waiting = [
        ([request.prompt], SamplingParams(**request.params, extra=key)) for key, request in requests.items()
    ]
    while waiting or not llm.is_finished():
        for _ in range(len(waiting) if pick is None else pick.randint(0, len(waiting))):
            llm.add(llm.prompts.read_all(*waiting.pop(0)))
        for _ in range(pick.choice([1, 1, 3, 10]) if pick else 1):
            llm.step()


def alone(model: Path | str, requests: list[Request], **options: Any) -> dict[int, list[bytes]]:
    """The logits of each, computed when no other is there: in one piece, nothing found in the cache."""
    recorder = Recorder()
    options |= dict(max_num_seqs=1, enable_prefix_caching=False, extensions=[recorder])
    with LLM(str(model), num_kvcache_blocks=32, kvcache_block_size=64, **options) as llm:
        generate(llm, dict(enumerate(requests)))
    return recorder.take()


def random_settings(pick: random.Random) -> dict[str, Any]:
    block_size = pick.choice([16, 32, 64])
    fewest = -(-LONGEST // block_size)
    return dict(
        kvcache_block_size=block_size,
        num_kvcache_blocks=pick.choice([fewest, fewest + 1, fewest + pick.randint(1, 5), 200]),
        max_num_seqs=pick.choice([1, 2, 3, 6, 20, 64]),
        max_num_batched_tokens=pick.choice([11, 33, 64, 100, 500, 16384]),
        enable_prefix_caching=pick.random() < 0.8,
    )


def compare(
    model: Path | str, num_engines: int, seed: int, num_requests: int = 24, **options: Any
) -> tuple[Counter, list[str]]:
    """
    Engines of random settings, with these `options` of all (device, dtype, exact, ...), compute SEVERAL
    batches each of some of the requests. Returns what has happened, and one text for each completion whose
    logits are not those of the request alone.
    """
    pick = random.Random(seed)
    requests = make_requests(pick, num_requests)
    expected = alone(model, requests, **options)
    counts, different = Counter(), []
    for _ in range(num_engines):
        settings, recorder = random_settings(pick), Recorder()
        with LLM(str(model), **settings, **options, extensions=[recorder]) as llm, Watch(llm) as watch:
            for _ in range(SEVERAL):
                chosen = pick.sample(range(num_requests), pick.randint(1, 10))
                generate(llm, {key: requests[key] for key in chosen}, pick.choice([None, pick]))
                for key, found in recorder.take().items():
                    for i, (mine, wanted) in enumerate(zip(found, expected[key], strict=True)):
                        counts["completions"] += 1
                        if mine != wanted:
                            different.append(f"completion {i} of request {key} of {chosen} with {settings}")
                counts["schedules"] += 1
        inside_blocks = [num_cached % settings["kvcache_block_size"] for num_cached in watch.cached]
        counts["copies"] += sum(map(bool, inside_blocks))
        counts["preemptions"] += watch.preemptions
        counts["chunks"] += watch.chunks
        counts["hits"] += sum(map(bool, watch.cached))
    return counts, different
