"""What was measured, for people and for programs, and drawn over time."""

import platform
import re
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

PHASES = ("prefill", "decode")


def summarize(runs: list[Counter[str]]) -> dict[str, Any]:
    """The median repetition (of an even number the slower one in the middle), the spread, and all of them."""
    for run in runs:
        run["tokens_per_second"] = run["output_tokens"] / run["seconds"]
        for phase in PHASES:
            run[f"{phase}_share"] = run[f"{phase}_seconds"] / run["seconds"]
    ordered = sorted(runs, key=itemgetter("tokens_per_second"))
    slowest, fastest = (run["tokens_per_second"] for run in (ordered[0], ordered[-1]))
    spread = {"tokens_per_second_min": slowest, "tokens_per_second_max": fastest}
    return {**ordered[(len(runs) - 1) // 2], **spread, "repeats": runs}


def describe(name: str, result: dict[str, Any]) -> str:
    """A few lines for people."""
    lines = [
        f"{name}: {result['output_tokens']:,} output tokens in {result['seconds']:.2f} s, "
        f"{result['tokens_per_second']:,.1f} tok/s (median of {len(result['repeats'])}, from "
        f"{result['tokens_per_second_min']:,.1f} to {result['tokens_per_second_max']:,.1f})"
    ]
    for phase in PHASES:
        tokens, seconds, share = (
            result.get(f"{phase}_{figure}", 0) for figure in ("tokens", "seconds", "share")
        )
        if seconds:
            speed = f"{tokens / seconds:,.1f} tok/s"
            lines.append(f"  {phase:8}{tokens:9,} tokens in {seconds:.2f} s ({share:.1%}), {speed}")
    cached, copied, grouped = (result.get(f"{kind}_tokens", 0) for kind in ("cached", "copied", "grouped"))
    if cached or grouped:
        taken = f"{cached:9,} tokens taken over, {copied:,} copied; {grouped:,} read in groups"
        lines.append(f"  shared  {taken}")
    return "\n".join(lines)


def describe_cpu() -> str:
    """The model, where the system tells it, else the architecture."""
    try:
        models = re.search("^model name\\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # on another system than Linux
        models = None
    return models[1] if models else platform.processor() or platform.machine()


def describe_device(device: str) -> str:
    if device == "cpu":
        return f"{describe_cpu()} with {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)


def plot(timeline: list[tuple[float, ...]], title: str, file: str) -> None:
    """Draw batch size, KV cache use, and the speed of either phase over one repetition."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    figure.suptitle(title)
    seconds, *curves = zip(*timeline, strict=True)
    edges = np.linspace(0, seconds[-1], 101)
    labels = ("prefill tok/s", "decode tok/s", "sequences running", "KV cache blocks")
    axes = figure.subplots(4, sharex=True)
    for axis, label, values in zip(axes, labels, curves, strict=True):
        if "tok/s" in label:
            # A step's tokens are spread over all the time that it took.
            total = np.interp(edges, [0, *seconds], np.cumsum([0, *values]))
            axis.stairs(np.diff(total) / np.diff(edges), edges, fill=True)
        else:
            axis.plot(seconds, values)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds")
    figure.savefig(file)
