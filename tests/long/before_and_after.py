"""Is this checkout as fast as another one? Measures both on this machine, in turn.

`python tests/long/before_and_after.py BEFORE` runs bench.py of the checkout in the folder BEFORE and of this
one, a process each, in the order before, after, after, before, and so on: what changes while the machine
warms up then meets both alike. Prints for each workload the median and the range of either checkout, and the
ratio of the medians. Exits with 1 if this checkout is slower by more than `--tolerance`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONE = "--min-input-len 128 --max-input-len 128 --min-output-len 512 --max-output-len 512"
FP8 = "--quantization fp8 --kv-cache-dtype int8"
# Options of bench.py that old checkouts know too.
WORKLOADS = {
    "0.6b": "",
    "0.6b one": f"--num-seqs 1 {ONE}",
    "0.6b int8 cache": "--kv-cache-dtype int8",
    "0.6b shared": "--workload shared",
    "8b": "--model qwen3-8b",
    "8b fp8": f"--model qwen3-8b {FP8}",
    "30b-a3b fp8": f"--model qwen3-30b-a3b {FP8}",
    "gpt-oss": "--model gpt-oss-20b",
}


def measure(checkout: Path, options: list[str]) -> list[float]:
    """Output tokens per second of each repetition after the warm-up."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with tempfile.NamedTemporaryFile() as report:
        command = [sys.executable, str(checkout / "bench.py"), *options, "--json", report.name]
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        results = json.load(report)["results"]["nanovllm"]
    return [run["output_tokens"] / run["seconds"] for run in results["repeats"]]


def compare(name: str, before: Path, runs: int, more: list[str]) -> float:
    """The ratio of the medians, after to before."""
    speeds: dict[Path, list[float]] = {before: [], ROOT: []}
    for i in range(runs):
        for checkout in (before, ROOT) if i % 2 == 0 else (ROOT, before):
            speeds[checkout] += measure(checkout, WORKLOADS[name].split() + more)
    medians = [statistics.median(found) for found in speeds.values()]
    shown = [
        f"{median:,.1f} ({min(found):,.1f} to {max(found):,.1f})"
        for median, found in zip(medians, speeds.values(), strict=True)
    ]
    ratio = medians[1] / medians[0]
    print(f"{name}: {shown[0]} before, {shown[1]} after: {ratio:.4f}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout of the project")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--runs", type=int, default=2, help="processes of each checkout")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--options", default="", help="more options of bench.py, for all workloads")
    args = parser.parse_args()
    before, more = args.before.resolve(), args.options.split()
    ratios = [compare(name, before, args.runs, more) for name in args.workloads]
    sys.exit(min(ratios) < 1 - args.tolerance)


if __name__ == "__main__":
    main()
