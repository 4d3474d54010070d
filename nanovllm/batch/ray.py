"""A batch over several engines: this process hands spans of the input to Ray actors, each with an engine of
its own, and writes their answers. Only this module knows Ray.

Spans are read as the engines have room for them. The answers of a span arrive all at once or not at all, so
that none is missing or double. When an engine dies another one takes its place, and the spans that it had
under way are computed again: at first together with others, then alone, then line by line. Only a line that
ends an engine alone is to blame for it, and answered with the error. If this process dies, --resume goes on
from the output.
"""

import argparse
import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.async_llm import AsyncLLM
from nanovllm.batch.files import Output, Span, read_span, split, split_lines
from nanovllm.batch.lines import Answer, LineError, answer, answer_error, parse_line, read_request
from nanovllm.config import Config
from nanovllm.distributed.ranks import EngineDeadError

try:
    import ray
except ImportError as error:
    raise ValueError('--data-parallel needs Ray: pip install -e ".[ray]"') from error

MAX_SPAN = 128  # lines; what is lost with an engine, for each span under way
SPANS_PER_ENGINE = 32  # at least, where the input is long enough, for all engines to end at the same time
MAX_ATTEMPTS = 3  # of a span, the last one alone in its engine
MAX_DEATHS = 8  # of engines that take each other's place, without an answer of any


class Engine:
    """An actor: several calls run in it at once, so that the engine need not wait for a span's last line."""

    def __init__(self, path: str, model: str, options: dict[str, Any], defaults: dict[str, Any], seed: Any):
        self.path, self.defaults, self.seed = Path(path), defaults, seed
        self.model, self.options = model, options

    async def start(self) -> None:
        """Load the model: no part of the constructor, of whose exceptions Ray passes on only the text."""
        self.llm = AsyncLLM(self.model, **self.options)

    async def answer(self, span: Span) -> list[Answer]:
        return await asyncio.gather(*itertools.starmap(self._answer, read_span(self.path, span)))

    async def _answer(self, line: int, text: bytes) -> Answer:
        try:
            request, token_ids = read_request(self.llm.llm, line, text, self.defaults, self.seed)
        except LineError as error:
            return answer_error(line, error)
        try:
            result = await self.llm.generate(token_ids, request.params)
        except EngineDeadError:
            raise
        except Exception as error:  # of this request alone
            result = error
        return answer(request, result, self.llm.llm.config.model)


def run_on_ray(
    args: argparse.Namespace,
    output: Output,
    num_lines: int,
    report: Callable[[Answer], None],
    started: Callable[[float], None],
    warn: Callable[[str], None],
) -> None:
    """
    Answer the `num_lines` that `output` does not hold yet, with `args.data_parallel` engines. `started` is
    told when the first engine was there, `warn` of every engine that dies.
    """
    size = max(1, min(MAX_SPAN, num_lines // (args.data_parallel * SPANS_PER_ENGINE)))
    with _cluster(args):
        # No shuffle: the lines of a span stand together in the input, so that prompts with a common beginning
        # that were written one after the other meet in one engine, and its prefix cache.
        pool = Pool(args, split(args.input, size, output), num_lines, warn)
        for number, found in enumerate(itertools.chain.from_iterable(pool.answers())):
            if not number:
                started(pool.began)
            report(found)


class _cluster:
    """Ray for as long as the run lasts: the cluster at --ray-address, or one of this host alone."""

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def __enter__(self) -> None:
        how: dict[str, Any] = {"address": self.args.ray_address}
        if self.args.ray_address is None:
            # Ray counts on a core for each actor, also where there are fewer.
            num_cpus = max(os.cpu_count() or 1, self.args.data_parallel)
            how = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
        ray.init(**how, log_to_driver=False, logging_level="ERROR")

    def __exit__(self, *_: Any) -> None:
        ray.shutdown()


def _resources(args: argparse.Namespace) -> dict[str, float]:
    """What each actor needs of the cluster. Raises ValueError if that is more than it has."""
    count, ranks = args.data_parallel, args.engine.get("tensor_parallel_size", Config.tensor_parallel_size)
    there = ray.cluster_resources()
    if args.engine.get("device") == "cpu" or not there.get("GPU"):
        return {"num_cpus": max(1, int(there["CPU"]) // count), "num_gpus": 0}
    if count * ranks > there["GPU"]:
        raise ValueError(
            f"--data-parallel {count} with tensor_parallel_size={ranks} needs {count * ranks} GPUs, but the "
            f"Ray cluster has {there['GPU']:.0f}"
        )
    return {"num_cpus": 1, "num_gpus": ranks}


class Work(NamedTuple):
    """A span, and how many engines have died while it was under way in them."""

    span: Span
    num_deaths: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it must be alone in its engine, which then dies through no other's fault."""
        return self.num_deaths == MAX_ATTEMPTS - 1


@dataclass(eq=False)
class Member:
    """An engine of the pool."""

    actor: Any
    num_deaths: int  # of those that it takes the place of, since the last answer of any
    is_up: bool = False
    load: int = 0  # lines under way; a suspect takes all the room


class Pool:
    """
    The engines, and what they have under way. What is computed again comes before what is new, and suspects
    in the end, when an engine has nothing else to do.
    """

    def __init__(
        self, args: argparse.Namespace, spans: Iterator[Span], num_lines: int, warn: Callable[[str], None]
    ):
        self.args, self.spans, self.num_missing, self.warn = args, spans, num_lines, warn
        self.began: float | None = None  # when the first engine was there
        self.again: deque[Work] = deque()
        self.suspects: deque[Work] = deque()
        # Spans wait for their last lines: four times what an engine can run keeps it full meanwhile. But none
        # may have more than its share.
        max_num_seqs = args.engine.get("max_num_seqs", Config.max_num_seqs)
        self.room = min(4 * max_num_seqs, -(-num_lines // args.data_parallel))  # lines
        self.actors = ray.remote(Engine).options(**_resources(args), max_concurrency=self.room)
        self.calls: dict[Any, tuple[Member, Work | None]] = {}  # under way; without work the engine starts
        self.members = [self._start() for _ in range(args.data_parallel)]

    def answers(self) -> Iterator[list[Answer]]:
        """Those of one span after the other, in the order in which they are done."""
        while self.num_missing and self._feed():
            [call], _ = ray.wait(list(self.calls))
            member, work = self.calls.pop(call)
            try:
                answers = ray.get(call) or []  # a start has none
            except ray.exceptions.RayError as error:
                answers = self._recover(member, work, _cause_of_death(error))
            else:
                self._finish(member, work)
            self.num_missing -= len(answers)
            yield answers

    def _start(self, num_deaths: int = 0) -> Member:
        args = self.args
        model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
        actor = self.actors.remote(str(args.input.resolve()), model, args.engine, args.defaults, args.seed)
        member = Member(actor, num_deaths)
        self.calls[actor.start.remote()] = member, None
        return member

    def _feed(self) -> bool:
        """Give the engines as much as they have room for. False where nothing is under way then."""
        for member in self.members:
            while member.is_up and member.load < self.room and (work := self._next(member)) is not None:
                member.load += self._load(work)
                self.calls[member.actor.answer.remote(work.span)] = member, work
        return bool(self.calls)

    def _next(self, member: Member) -> Work | None:
        if self.again:
            return self.again.popleft()
        if (span := next(self.spans, None)) is not None:
            return Work(span)
        return self.suspects.popleft() if self.suspects and not member.load else None

    def _load(self, work: Work) -> int:
        return self.room if work.is_suspect else work.span.num_missing

    def _finish(self, member: Member, work: Work | None) -> None:
        if work is None:
            member.is_up, self.began = True, self.began or time.time()
        else:
            member.load -= self._load(work)
            member.num_deaths = 0

    def _recover(self, member: Member, work: Work | None, cause: str) -> list[Answer]:
        """Do again, in another engine, what one was doing that has died."""
        if member in self.members:  # no other call has told of it
            self._replace(member, work, cause)
        if work is None:
            return []
        span, work = work.span, Work(work.span, work.num_deaths + 1)
        if work.num_deaths < MAX_ATTEMPTS:
            (self.suspects if work.is_suspect else self.again).append(work)
        elif span.num_missing == 1:
            return [self._blame(span, cause)]
        else:
            self.warn(f"{span.num_missing} lines from {span.first_line} on are tried one by one")
            self.suspects.extend(Work(line, MAX_ATTEMPTS - 1) for line in split_lines(span))
        return []

    def _replace(self, member: Member, work: Work | None, cause: str) -> None:
        ray.kill(member.actor)  # its process can outlive the engine
        num_deaths = member.num_deaths + 1
        if num_deaths == MAX_DEATHS:
            raise RuntimeError(
                f"{num_deaths} engines in a row have died without an answer, the last: {cause}"
            )
        lost = [work, *(other for owner, other in self.calls.values() if owner is member)]
        num_lost = sum(work.span.num_missing for work in lost if work is not None)
        self.warn(f"an engine has died with {num_lost} lines under way, another takes its place: {cause}")
        self.members[self.members.index(member)] = self._start(num_deaths)

    def _blame(self, span: Span, cause: str) -> Answer:
        """What a line is answered with that has ended an engine alone."""
        [(line, text)] = read_span(self.args.input, span)
        try:
            custom_id = parse_line(line, text, self.args.defaults).custom_id
        except LineError as error:
            custom_id = error.custom_id
        error = LineError(f"every engine that computed it has died: {cause}", custom_id)
        return answer_error(line, error, "server_error")


def _cause_of_death(error: Exception) -> str:
    """Why an engine is no more. Raises what no other engine would mend, such as a bad option."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return str(error).strip().splitlines()[-1]
    if isinstance(error.cause, RuntimeError | MemoryError):
        return _describe(error.cause)
    raise error.cause


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
