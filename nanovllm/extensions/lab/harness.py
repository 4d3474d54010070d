"""Runs a trace on an engine and says what its users would have seen.

Works with any engine: a Simulator, whose clock is a number, or an LLM, whose requests then arrive in real time.
"""

import json
import time
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanovllm.extensions.lab.traces import Arrival
from nanovllm.sampling_params import SamplingParams


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


def percentile(values: Items[float], share: float) -> float:
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
            times.append([])
        engine.step()
        for seq, seen in zip(sequences, times, strict=True):
            num_new = len(seq.token_ids) - seq.num_prompt_tokens - len(seen)
            seen += [clock()] * num_new
    return Report(
        first_token=[seen[0] - start for seen, start in zip(times, arrived, strict=True)],
        longest_gap=[max((b - a for a, b in zip(seen, seen[1:], strict=False)), default=0.0) for seen in times],
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
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


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
