"""Offline generation for a file of prompts of any length.

    python -m nanovllm.batch --model M --input in.jsonl --output out.jsonl [--resume]

Lines are read and tokenized when the engine has room for them, and each answer is written as soon as it is
there: memory does not grow with the file, and whatever ends a run, --resume goes on from what the output
holds. lines.py has what lines look like, files.py how files are read and written, and ray.py how Ray spreads
the work over several engines.
"""

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from nanovllm import EngineArgs
from nanovllm.extensions.batch.files import find_lines, open_output, read_lines
from nanovllm.extensions.batch.lines import Answer, Request, answer, describe, read_request
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils import FlexibleArgumentParser

ORDER = """\
Every line of the input, blank ones aside, gets one line in the output, written when it is done and so not in
order. Each has the number of its input line, counted from 1, as "line", and the "custom_id" of that line
where it has one: sort by either to restore the order (jq -s -c 'sort_by(.line)[]' out.jsonl). A custom_id
that occurs twice is answered twice. A line that cannot be served is answered with an "error" and stops
nothing. --resume needs the input that the run began with, for lines are known by their numbers."""

CHUNK, CHUNKS_AHEAD = 32, 8  # of requests that are read before the engine asks for them


class _Stderr:
    """stderr, but no run ends because writing to it fails: its reader may be gone, or its disk full."""

    def write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # ValueError where it was closed
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  else Python flushes it at the exit, and fails

    def flush(self) -> None:
        """Nothing is left to do after `write`."""

    def __getattr__(self, name: str) -> Any:  # tqdm asks for its encoding and width
        return getattr(sys.stderr, name)


class Progress:
    """
    The progress bar: finished lines, time left, tokens drawn per second, errors. It counts by itself, since
    a bar that TQDM_DISABLE hides counts nothing.
    """

    def __init__(self, num_lines: int):
        self.num_answers = self.num_tokens = self.num_errors = 0
        self.start, self.file = time.time(), _Stderr()
        self.bar = tqdm(
            total=num_lines, file=self.file, unit="line", desc="Batch", smoothing=0, dynamic_ncols=True
        )

    def update(self, answer: Answer) -> None:
        self.num_answers += 1
        self.num_tokens += answer.num_tokens
        self.num_errors += answer.is_error
        speed = self.num_tokens / self._seconds()
        self.bar.set_postfix_str(f"{speed:.0f}tok/s, {self.num_errors} errors", refresh=False)
        self.bar.update()

    def restart(self) -> None:
        """Leave what came before, such as loading the model, out of the speed."""
        self.start = self.bar.start_t = time.time()

    def warn(self, text: str) -> None:
        self.bar.write(f"nanovllm.batch: {text}", file=self.file)

    def close(self) -> None:
        self.bar.close()
        seconds = self._seconds()
        done = f"{self.num_answers} lines, {self.num_errors} of them errors, {self.num_tokens} tokens"
        print(f"{done} in {seconds:.1f} s: {self.num_tokens / seconds:.0f} tok/s", file=self.file)

    def _seconds(self) -> float:
        return max(time.time() - self.start, 1e-3)  # clocks can be set back


def read_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, computed ahead in chunks by a thread, while the device is busy."""

    def take() -> list[Any]:
        return list(itertools.islice(items, CHUNK))

    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(take) for _ in range(CHUNKS_AHEAD))
        try:
            while ready := ahead.popleft().result():
                ahead.append(pool.submit(take))
                yield from ready
        finally:
            pool.shutdown(cancel_futures=True)


def run(
    llm: LLM, lines: Iterable[tuple[int, bytes]], report: Callable[[Answer], None], defaults: dict[str, Any]
) -> None:
    """Answer all lines with one engine. `report` gets each answer when it is done."""
    # By the number that the engine gives a prompt: its line's request, how many prompts that has, and the
    # results that there are, by the numbers of their prompts.
    prompts_of: dict[int, tuple[Request, int, dict[int, Any]]] = {}
    numbers = itertools.count()

    def feed() -> Iterator[tuple[list[int], SamplingParams]]:
        for found in read_ahead(read_request(llm, line, text, defaults) for line, text in lines):
            if isinstance(found, Answer):
                report(found)
                continue
            request, prompts = found
            results: dict[int, Any] = {}
            for token_ids in prompts:
                prompts_of[next(numbers)] = request, len(prompts), results
                yield token_ids, request.params

    with contextlib.closing(feed()) as requests:
        for number, result in llm.generate_from(requests, return_exceptions=True):
            request, count, results = prompts_of.pop(number)
            results[number] = result
            if len(results) == count:
                report(answer(request, [results[i] for i in sorted(results)], llm.config.model))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. `engine` are the options for `LLM` in it, `defaults` those for SamplingParams."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = FlexibleArgumentParser(prog="nanovllm batch", formatter_class=layout)
    parser.description, parser.epilog = "Generate text for a file of prompts.", ORDER
    add = parser.add_argument
    add("--model", required=True, help="folder, .gguf file or hub id")
    add("--input", type=Path, required=True, help="lines of .jsonl, .txt or .parquet")
    add("--output", type=Path, required=True, help="gets the answers, a JSON object a line")
    add("--data-parallel", type=int, metavar="N", help="engines, spread by Ray over the GPUs of its cluster")
    address = "of a Ray cluster, such as auto (default: $RAY_ADDRESS, or else one of this host alone)"
    add("--ray-address", default=os.environ.get("RAY_ADDRESS"), help=address)
    add("--resume", action="store_true", help="answer what the output does not hold yet")
    seed = "makes sampling repeatable: line i draws with a seed made of this and i, unless it has its own"
    most = "most tokens to generate (default: 256, and as many as fit for OpenAI's lines)"
    sampling = {"seed": (int, seed), "max_tokens": (int, most)}
    args = EngineArgs.parse_options(parser, argv, "for lines that do not say otherwise", sampling)
    if args.data_parallel is not None and args.data_parallel < 1:
        raise ValueError(f"--data-parallel must be at least 1, got {args.data_parallel}")
    if not args.input.is_file():
        raise ValueError(f"--input {args.input} is no regular file (a pipe will not do: it is read twice)")
    if args.output.exists() and args.output.samefile(args.input):
        raise ValueError(f"--output {args.output} is the --input")
    return args


def main(argv: list[str] | None = None) -> bool:
    """Returns whether there were lines to answer, and none could be."""
    if sys.stderr is None:  # it was closed: the next file would get number 2, and what libraries write there
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    args = parse_args(argv)
    with contextlib.closing(open_output(args.output, args.resume, find_lines(args.input))) as output:
        num_lines = output.done.count(0)
        with contextlib.closing(Progress(num_lines)) as progress:

            def report(answer: Answer) -> None:
                output.write(answer)
                progress.update(answer)

            if num_lines and args.data_parallel is not None:
                # An extra, which takes a second to import.
                from nanovllm.extensions.batch.ray import run_on_ray

                run_on_ray(args, output, report, progress)
            elif num_lines:
                with LLM(args.model, **args.engine) as llm:
                    progress.restart()
                    run(llm, read_lines(args.input, output.done), report, args.defaults)
        return 0 < num_lines == progress.num_errors


def run_command(argv: list[str] | None = None) -> None:
    """
    `main`, for a shell: errors that a user can cause or correct are one line each. The exit code is 1 after
    an error or if every line was answered with one, and 130 after Ctrl-C.
    """
    try:
        if main(argv):
            sys.exit("nanovllm.batch: every line was answered with an error, see the output")
    except (ValueError, OSError) as error:
        sys.exit(f"nanovllm.batch: {error}")
    except (RuntimeError, MemoryError) as error:  # a rank has died, or the device's memory is too small
        sys.exit(f"nanovllm.batch: {describe(error)}; --resume goes on from here")
    except KeyboardInterrupt:
        print("nanovllm.batch: interrupted; --resume goes on from here", file=_Stderr())
        sys.exit(130)  # what a shell makes of an end by this signal


if __name__ == "__main__":
    run_command()
