#!/usr/bin/env python3
"""Times decode steps of one model with other constants, a few seconds each: which are fastest on this GPU?

    python tests/long/decode_steps.py "experts in fp8" --rows 192 \\
        --try "grouped_fp8.FP8_TILES[24] = Tile(32, 3, BLOCK_N=64)" "quantised_matvec.HEIGHT = 4"

The models are those of formats.py. So many rows, sequences of random lengths, are prefilled once. Then, for
what stands there and for each statement, their step is recorded anew as a CUDA graph and replayed, always
from the same state: differences of 0.3% show. A statement assigns to something in a module of kernels, by the
module's last name (with the extension's before it, as `experts_gemv`, where several share it), and is taken
back afterwards. With --profile the kernels of a step are listed.
"""

import argparse
import importlib
import json
import random
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from formats import FORMATS, TINY

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.extensions.quantised.kernels.grouped_gemm import Tile

STEPS, REPEATS, WARM_UP = 60, 3, 10


def modules_of_kernels() -> dict[str, Any]:
    """By the names that statements have for them, and what else statements need."""
    found: dict[str, Any] = {"Tile": Tile}
    package = Path(nanovllm.__file__).parent
    files = package.glob("**/kernels/[!_]*.py")
    paths = [file.relative_to(package.parent).with_suffix("").parts for file in files]
    shared = Counter(path[-1] for path in paths)
    for path in paths:
        name = path[-1] if shared[path[-1]] == 1 else f"{path[-3]}_{path[-1]}"
        found[name] = importlib.import_module(".".join(path))
    return found


class Steps:
    """A model whose sequences are about to decode."""

    def __init__(self, name: str, rows: int, lengths: list[int], cache: str, is_tiny: bool):
        config, options, of_file = FORMATS[name]
        config = config | (TINY if is_tiny else {}) | ({"quantization_config": of_file} if of_file else {})
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            options = options | dict(load_format="dummy", kv_cache_dtype=cache)
            llm = LLM(folder, max_num_seqs=max(rows, 2), gpu_memory_utilization=0.6, **options)
        rng = random.Random(0)
        for _ in range(rows):
            prompt = [rng.randrange(3, 32768) for _ in range(rng.randint(*lengths))]
            llm.add_request(prompt, SamplingParams(max_tokens=1000, ignore_eos=True))
        while llm.scheduler.waiting or len(llm.scheduler.running) < rows or not llm.model_runner.decoded:
            llm.step()
        llm.step()
        self.llm = llm  # which would end its runner
        self.runner, self.is_on_gpu = llm.model_runner, llm.model_runner.device.type == "cuda"
        self.kind = max(self.runner.decoded)
        self.state = self.runner.slots.buffer.clone()

    @torch.inference_mode()
    def time(self) -> float:
        """Microseconds of a step."""
        with self.runner.on_device():
            self.runner.decoded.clear()
            self.runner.capture_cudagraph(self.kind)
            self._replay(WARM_UP)
            return statistics.median(self._replay(STEPS) for _ in range(REPEATS))

    def _replay(self, count: int) -> float:
        self.runner.slots.buffer.copy_(self.state)
        if not self.is_on_gpu:
            self.runner.decoded[self.kind]()()
            return 0.0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            self.runner.decoded[self.kind]()()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count

    @torch.inference_mode()
    def print_kernels(self) -> None:
        with self.runner.on_device(), torch.profiler.profile() as profile:
            self._replay(WARM_UP)
        times = {each.key: each.device_time_total / WARM_UP for each in profile.key_averages()}
        for name in sorted(times, key=times.get, reverse=True)[:20]:
            print(f"{times[name]:10.1f} us  {name[:90]}")


def tried(steps: Steps, statement: str, names: dict[str, Any]) -> float | str:
    """Microseconds of a step with this, which is then taken back; or the error that it is."""
    target, _, _ = statement.partition(" = ")
    before = eval(target, names)
    try:
        exec(statement, names)
        return steps.time()
    except Exception as error:  # too much shared memory, say
        return f"{type(error).__name__}: {error}"[:100]
    finally:
        exec(f"{target} = before", names, {"before": before})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", nargs=2, type=int, default=[300, 1600], help="of sequences, tokens")
    parser.add_argument("--kv-cache-dtype", default="int8")
    parser.add_argument("--try", nargs="+", default=[], dest="statements", metavar="STATEMENT")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: shows that it runs")
    args = parser.parse_args()
    lengths = [2, 4] if args.tiny else args.lengths
    steps = Steps(args.format, args.rows, lengths, args.kv_cache_dtype, args.tiny)
    names, first = modules_of_kernels(), steps.time()
    print(f"{first:10.1f} us as it is", flush=True)
    if args.profile:
        steps.print_kernels()
    for statement in args.statements:
        found = tried(steps, statement, names)
        shown = found if isinstance(found, str) else f"{found:10.1f} us"
        print(f"{shown}  {statement}", flush=True)
    print(f"{steps.time():10.1f} us as it is, again")


if __name__ == "__main__":
    main()
