"""A batch over several engines: Ray Data hands spans of the input to a pool of actors, each with an engine of
its own, and the answers come back to this process, which writes them. Only this module knows Ray.

Ray restarts an actor that dies and computes its unfinished spans again. A span's answers arrive all at once
or not at all, so that none is missing or double. If this process dies, --resume goes on from the output.
"""

import argparse
import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.batch_files import Output, Span, read_span, split
from nanovllm.batch_lines import Answer, LineError, answer, answer_error, read_request
from nanovllm.config import Config

try:
    import ray
    from ray.data import ActorPoolStrategy, DataContext
except ImportError as error:
    raise ValueError('--data-parallel needs Ray: pip install -e ".[ray]"') from error

MAX_SPAN = 128  # lines; what is lost with an actor, for each span under way
SPANS_PER_ACTOR = 32  # at least, where the input is long enough, for all actors to end at the same time


class Engine:
    """An actor: several calls run in it at once, so that the engine need not wait for a span's last line."""

    def __init__(self, path: str, model: str, options: dict[str, Any], defaults: dict[str, Any], seed: Any):
        self.path, self.defaults, self.seed = Path(path), defaults, seed
        self.llm = AsyncLLM(model, **options)

    async def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """A block with one column of spans becomes one with a column for each field of the answers."""
        began = time.time()
        lines = itertools.chain.from_iterable(map(self._read, zip(*block.values(), strict=True)))
        answers = await asyncio.gather(*itertools.starmap(self._answer, lines))
        columns = zip(Answer._fields, zip(*answers, strict=True), strict=True)
        return {"began": [began] * len(answers), **{name: list(column) for name, column in columns}}

    def _read(self, fields: tuple[Any, ...]) -> list[tuple[int, bytes]]:
        *places, done = fields
        return read_span(self.path, Span(*map(int, places), bytes(done)))

    async def _answer(self, line: int, text: bytes) -> Answer:
        try:
            request, token_ids = read_request(self.llm.llm, line, text, self.defaults, self.seed)
        except LineError as error:
            return answer_error(line, error)
        try:
            result = await self.llm.generate(token_ids, request.params)
        except RuntimeError:  # the engine is gone, for example with a rank of it, and cannot be used again
            os._exit(1)  # Ray starts another actor; an exception would end the whole run
        return answer(request, result, self.llm.llm.config.model)


def run_on_ray(
    args: argparse.Namespace,
    output: Output,
    num_lines: int,
    report: Callable[[Answer], None],
    started: Callable[[float], None],
) -> None:
    """
    Answer what `output` does not hold yet with `args.data_parallel` engines. `started` is told when the first
    engine was there. There must be a line to answer.
    """
    with _cluster(args):
        size = max(1, min(MAX_SPAN, num_lines // (args.data_parallel * SPANS_PER_ACTOR)))
        # No shuffle: the lines of a span stand together in the input, so that prompts with a common beginning
        # that were written one after the other meet in one engine, and its prefix cache.
        spans = [span._asdict() for span in split(args.input, size, output)]
        try:
            for number, (began, answers) in enumerate(_blocks(args, spans, size)):
                if not number:
                    started(began)
                for found in answers:
                    report(found)
        except ray.exceptions.RayError as error:  # has the trace of all processes; the last line is the cause
            raise ValueError(f"Ray gave up: {str(error).strip().splitlines()[-1]}") from error


class _cluster:
    """Ray for as long as the run lasts: the cluster at --ray-address, or one of this host alone."""

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def __enter__(self) -> None:
        how: dict[str, Any] = {"address": self.args.ray_address}
        if self.args.ray_address is None:
            # Ray counts on a core for each actor and one for itself, also where there are fewer.
            num_cpus = max(os.cpu_count() or 1, self.args.data_parallel + 1)
            how = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
        ray.init(**how, log_to_driver=False, logging_level="ERROR")
        DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def __exit__(self, *_: Any) -> None:
        ray.shutdown()


def _resources(args: argparse.Namespace) -> dict[str, float]:
    """What each actor needs of the cluster. Raises ValueError if that is more than it has."""
    count, ranks = args.data_parallel, args.engine.get("tensor_parallel_size", Config.tensor_parallel_size)
    there = ray.cluster_resources()
    if args.engine.get("device") == "cpu" or not there.get("GPU"):
        return {"num_cpus": max(1, int(there["CPU"] - 1) // count), "num_gpus": 0}
    if count * ranks > there["GPU"]:
        raise ValueError(
            f"--data-parallel {count} with tensor_parallel_size={ranks} needs {count * ranks} GPUs, but the "
            f"Ray cluster has {there['GPU']:.0f}"
        )
    return {"num_cpus": 1, "num_gpus": ranks}


def _blocks(
    args: argparse.Namespace, spans: list[dict[str, Any]], size: int
) -> Iterator[tuple[float, list[Answer]]]:
    """For each span, in the order in which they are done: when it was begun, and the answers."""
    count, options = args.data_parallel, args.engine
    model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    max_num_seqs = options.get("max_num_seqs", Config.max_num_seqs)
    # Spans wait for their last lines: four times what an engine can run keeps it full meanwhile. But no actor
    # may have more than its share.
    num_under_way = min(-(-4 * max_num_seqs // size), -(-len(spans) // count))
    answers = ray.data.from_items(spans, override_num_blocks=len(spans)).map_batches(
        Engine,
        batch_size=1,  # a span, which is a block (Ray wants a size where there are GPUs)
        batch_format="numpy",
        compute=ActorPoolStrategy(
            size=count,
            max_tasks_in_flight_per_actor=num_under_way,
            max_concurrent_calls_per_actor=num_under_way,
        ),
        fn_constructor_args=(str(args.input.resolve()), model, options, args.defaults, args.seed),
        **_resources(args),
    )
    for block in answers.iter_batches(batch_size=None, batch_format="numpy"):
        rows = zip(*(block[name].tolist() for name in Answer._fields), strict=True)
        yield float(block["began"][0]), list(itertools.starmap(Answer, rows))
