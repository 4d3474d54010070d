"""One page for all experiments: workloads with arrival times, a loop that runs one, and what its users saw.

Works with any engine: a Simulator, whose clock is a number, or an LLM, whose requests arrive in real time.
The same seed always gives the same workload.

    reports = {"plain": run(Simulator(), burst()), "mine": run(Simulator(extensions=[Mine()]), burst())}
    print(table(reports))
"""

import contextlib
import inspect
import json
import linecache
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nanovllm
from nanovllm import SamplingParams

PACKAGE = Path(nanovllm.__file__).parent

# --- workloads ---


class Arrival(NamedTuple):
    seconds: float
    prompt: list[int]
    max_tokens: int


def tokens(rng: random.Random, count: int, vocab_size: int = 1000) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def steadily(rng: random.Random, prompts: list[list[int]], rate: float, max_tokens: int) -> list[Arrival]:
    """So many a second on average, at random moments."""
    moment, arrivals = 0.0, []
    for prompt in prompts:
        moment += rng.expovariate(rate)
        arrivals.append(Arrival(moment, prompt, rng.randint(1, 2 * max_tokens)))
    return arrivals


def shared_prefix(
    count: int = 200, prefix: int = 300, rate: float = 50, max_tokens: int = 50, seed: int = 0
) -> list[Arrival]:
    """All prompts begin alike and go on differently, as with few-shot examples."""
    rng = random.Random(seed)
    common = tokens(rng, prefix)
    return steadily(rng, [common + tokens(rng, rng.randint(5, 60)) for _ in range(count)], rate, max_tokens)


def long_among_short(
    count: int = 200, long: int = 3000, every: int = 20, rate: float = 50, seed: int = 0
) -> list[Arrival]:
    """Short questions, and now and then a whole document."""
    rng = random.Random(seed)
    lengths = [long if i % every == every // 2 else rng.randint(10, 100) for i in range(count)]
    return steadily(rng, [tokens(rng, length) for length in lengths], rate, 60)


def burst(count: int = 300, seed: int = 0) -> list[Arrival]:
    """All at once, of every length."""
    rng = random.Random(seed)
    return [Arrival(0.0, tokens(rng, rng.randint(10, 1000)), rng.randint(10, 400)) for _ in range(count)]


def skewed_reuse(
    count: int = 400, prefixes: int = 60, length: int = 256, rate: float = 50, seed: int = 0
) -> list[Arrival]:
    """Prompts that begin with one of several texts, some of which are far more popular than others."""
    rng = random.Random(seed)
    texts = [tokens(rng, length) for _ in range(prefixes)]
    popularity = [1 / (rank + 1) for rank in range(prefixes)]
    chosen = rng.choices(texts, popularity, k=count)
    return steadily(rng, [text + tokens(rng, rng.randint(5, 40)) for text in chosen], rate, 30)


# --- running one ---


@dataclass
class Report:
    """Times in seconds, a number for each request."""

    first_token: list[float]  # after it arrived
    longest_gap: list[float]  # between two tokens
    finished: list[float]  # after it arrived
    token_ids: list[list[int]]
    num_cached_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    seconds: float

    @property
    def summary(self) -> dict[str, float]:
        return {
            "first token p50 [s]": percentile(self.first_token, 50),
            "first token p99 [s]": percentile(self.first_token, 99),
            "finished p50 [s]": percentile(self.finished, 50),
            "longest gap p50 [s]": percentile(self.longest_gap, 50),
            "longest gap max [s]": max(self.longest_gap),
            "found in the cache [%]": 100 * self.num_cached_tokens / self.num_prompt_tokens,
            "preemptions": self.num_preemptions,
            "tokens/s": sum(map(len, self.token_ids)) / self.seconds,
        }

    def save(self, path: str | Path) -> None:
        """As JSON."""
        Path(path).write_text(json.dumps(asdict(self) | {"summary": self.summary}, indent=1))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share / 100 * (len(ordered) - 1))]


def run(engine: Any, trace: list[Arrival], **params: Any) -> Report:
    """Send the requests when they arrive, and step until all have ended. `params` as SamplingParams."""
    started = time.perf_counter()
    clock = getattr(engine, "clock", lambda: time.perf_counter() - started)
    wait_until = getattr(engine, "wait_until", lambda moment: time.sleep(max(0.0, moment - clock())))
    begin, options = clock(), {"temperature": 0.0, "ignore_eos": True} | params
    waiting = sorted(trace, key=lambda arrival: arrival.seconds)
    sequences, arrived, times = [], [], []
    running: set[int] = set()  # places in these lists
    num_preemptions = engine.scheduler.num_preemptions
    while waiting or not engine.is_finished():
        if engine.is_finished():
            wait_until(begin + waiting[0].seconds)
        while waiting and begin + waiting[0].seconds <= clock():
            arrival = waiting.pop(0)
            own = SamplingParams(**options, max_tokens=arrival.max_tokens)
            request_id = engine.add_request(arrival.prompt, own)
            sequences.append(engine.unfinished[request_id])
            arrived.append(begin + arrival.seconds)
            running.add(len(times))
            times.append([])
        engine.step()
        now = clock()
        for i in list(running):
            seq, seen = sequences[i], times[i]
            num_new = len(seq.token_ids) - seq.num_prompt_tokens - len(seen)
            seen += [now] * num_new
            if seq.is_finished:
                running.remove(i)
    return Report(
        first_token=[seen[0] - start for seen, start in zip(times, arrived, strict=True)],
        longest_gap=[
            max((b - a for a, b in zip(seen, seen[1:], strict=False)), default=0.0) for seen in times
        ],
        finished=[seen[-1] - start for seen, start in zip(times, arrived, strict=True)],
        token_ids=[seq.completion_token_ids for seq in sequences],
        num_cached_tokens=sum(seq.num_prompt_tokens_cached for seq in sequences),
        num_prompt_tokens=sum(seq.num_prompt_tokens for seq in sequences),
        num_preemptions=engine.scheduler.num_preemptions - num_preemptions,
        seconds=clock() - begin,
    )


def table(reports: dict[str, Report]) -> str:
    """A column for each report, a row for each number."""
    rows = [["", *reports]]
    for name in next(iter(reports.values())).summary:
        rows.append([name, *(f"{report.summary[name]:.4g}" for report in reports.values())])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def plot(reports: dict[str, Report], path: str | Path) -> None:
    """Which share of the requests has its first token after so many seconds. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, report in reports.items():
        values = sorted(report.first_token)
        axes.plot(values, [100 * (i + 1) / len(values) for i in range(len(values))], label=name)
    axes.set(xlabel="seconds to the first token", ylabel="% of requests", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


# --- seeing how the engine uses an extension ---


def is_core(path: str) -> bool:
    return Path(path).is_relative_to(PACKAGE) and not Path(path).is_relative_to(PACKAGE / "extensions")


@contextlib.contextmanager
def callers_of(*classes: type) -> Iterator[None]:
    """Print, for each method of these classes that is called, the first line of the core that calls it."""
    methods = {
        method.__code__: f"{cls.__name__}.{name}"
        for cls in classes
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and name != "__init__"
    }
    found: dict[str, str] = {}

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (name := methods.get(frame.f_code)) is not None and name not in found:
            caller = frame.f_back
            while caller is not None and not is_core(caller.f_code.co_filename):
                caller = caller.f_back
            if caller is not None:
                path = Path(caller.f_code.co_filename)
                line = linecache.getline(str(path), caller.f_lineno).strip()
                found[name] = f"{path.relative_to(PACKAGE)}:{caller.f_lineno}  {line}"

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        for name, line in found.items():
            print(f"{name} is called by {line}")
