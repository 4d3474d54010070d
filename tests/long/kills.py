"""Kills ranks of an engine, or all of its program, at random moments, and looks for what is left of it.

`python tests/long/kills.py --count 200 --seed 0 --jobs 2` starts a program with an engine of two ranks for
every kill, on the CPU: under load, or while it starts. Within seconds the program must have ended and, if it
was a rank that was killed, have said so; no process (and so no port), temporary folder or shared memory may
be left.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paths  # noqa: F401

from tiny_checkpoints import EXACT, make_checkpoint

LIMIT = 15  # seconds from a kill to the end of everything
PROGRAM = """
import sys
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], **{options!r}, num_kvcache_blocks=60, tensor_parallel_size=2)
print("ready", flush=True)
while True:
    llm.generate([[1, 2, 3], [*range(50)], [7] * 33], SamplingParams(0, 200, True), use_tqdm=False)
"""


def processes_with(folder: str) -> dict[int, int]:
    """The processes whose temporary folder this is, and their parents."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if f"TMPDIR={folder}\0".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def remains(folder: str) -> list[str]:
    left = [f"process {pid}" for pid in processes_with(folder)]
    left += [str(path) for path in Path(folder).glob("nanovllm-*")]
    return left + [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not name.startswith("sem.")]


def kill_once(checkpoint: str, seed: int) -> str:
    """What was killed and when. Raises AssertionError if something is left, or was not said."""
    pick = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(options=EXACT), checkpoint],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        under_load = pick.random() < 0.75
        if under_load:
            assert program.stdout.readline() == "ready\n", program.communicate()[1]
            time.sleep(pick.uniform(0, 0.5))
        else:
            while program.poll() is None and len(processes_with(folder)) < 2:
                time.sleep(0.02)
            time.sleep(pick.uniform(0, 2))
        ranks = [pid for pid, parent in processes_with(folder).items() if parent == program.pid]
        victim = pick.choice([program.pid, *ranks])
        os.kill(victim, 9)
        deadline = time.monotonic() + LIMIT
        _, complaint = program.communicate(timeout=LIMIT)
        while (left := remains(folder)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"seed {seed}: left {left}"
        if victim != program.pid:
            assert "EngineDeadError: rank 1 was killed by SIGKILL" in complaint, f"seed {seed}: {complaint}"
    what = "the program" if victim == program.pid else "a rank"
    return f"{what}, {'under load' if under_load else 'while it started'}"


def kill(checkpoint: str, count: int, seed: int, jobs: int) -> Counter:
    with ThreadPoolExecutor(jobs) as pool:
        return Counter(pool.map(lambda i: kill_once(checkpoint, seed + i), range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    args = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for what, count in kill(str(make_checkpoint(Path(folder))), args.count, args.seed, args.jobs).items():
            print(f"{count:6} x {what}")
    print(f"in {time.perf_counter() - start:,.0f} s; nothing was left of any")


if __name__ == "__main__":
    main()
