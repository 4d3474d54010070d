"""A batch over several engines: this process hands spans of lines to Ray actors, each with an engine of its
own, and writes their answers. Only this module knows Ray.

Spans are read when an engine has room for them. The answers of a span arrive all at once or not at all, so
none is missing or double. When an engine dies another one takes its place, and the spans that it had under
way are computed again: first together with others, then alone, then line by line. Only a line that kills an
engine in which it is alone is answered with an error. If this process dies, --resume goes on from the output.
"""

import asyncio
import itertools
import os
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm import AsyncLLM
from nanovllm.config import Config
from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.extensions.batch.files import Output, read_lines
from nanovllm.extensions.batch.lines import (
    Answer,
    answer,
    answer_error,
    describe,
    find_custom_id,
    read_request,
)

try:
    import ray
except ImportError as error:
    raise ValueError('--data-parallel needs Ray: pip install -e ".[ray]"') from error

Span = list[tuple[int, bytes]]  # neighbouring lines of those to be answered, with their numbers
MAX_SPAN = 128  # lines; an engine that dies loses at most as many answers for each span under way
SPANS_PER_ENGINE = 32  # at least, where the input is long enough: then all engines end at about the same time
MAX_ATTEMPTS = 3  # to compute a span, the last one alone in its engine
MAX_DEATHS = 8  # of engines in one place of the pool, one after another, without an answer from any
ROOM_FACTOR = 4  # lines under way in an engine, in multiples of the sequences it runs


class Engine:
    """The actor. It answers several spans at once, so that no engine waits for the last line of a span."""

    def __init__(self, model: str, args: Namespace):
        self.model, self.args = model, args

    async def start(self) -> None:
        """Load the model. Not in the constructor: of its exceptions Ray passes on nothing but the text."""
        self.llm = AsyncLLM(self.model, **self.args.engine)

    async def answer(self, span: Span) -> list[Answer]:
        return await asyncio.gather(*itertools.starmap(self._answer, span))

    async def _answer(self, line: int, text: bytes) -> Answer:
        found = read_request(self.llm.llm, line, text, self.args.defaults)
        if isinstance(found, Answer):
            return found
        request, prompts = found
        calls = (self.llm.generate(token_ids, request.params) for token_ids in prompts)
        results = await asyncio.gather(*calls, return_exceptions=True)  # exceptions of this request alone
        for result in results:
            if isinstance(result, EngineDeadError):
                raise result
        return answer(request, results, self.llm.llm.config.model)


def run_on_ray(args: Namespace, output: Output, report: Callable[[Answer], None], progress: Any) -> None:
    """
    Answer the lines that `output` does not hold yet, with `args.data_parallel` engines in the cluster at
    --ray-address, or in one of this host alone. `progress` begins anew when the first engine is ready, and
    warns of every engine that dies.
    """
    options: dict[str, Any] = {"address": args.ray_address}
    if args.ray_address is None:
        num_cpus = max(os.cpu_count() or 1, args.data_parallel)  # Ray wants one for each actor
        options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    ray.init(**options, log_to_driver=False, logging_level="ERROR")
    try:
        for found in Pool(args, output, progress).answers():
            report(found)
    finally:
        ray.shutdown()


def _resources(args: Namespace) -> dict[str, float]:
    """What each actor asks of the cluster. Raises ValueError if that is more than there is."""
    count, ranks = args.data_parallel, args.engine.get("tensor_parallel_size", Config.tensor_parallel_size)
    available = ray.cluster_resources()
    if args.engine.get("device") == "cpu" or not available.get("GPU"):
        return {"num_cpus": max(1, int(available["CPU"]) // count), "num_gpus": 0}
    if count * ranks > available["GPU"]:
        need = f"--data-parallel {count} with tensor_parallel_size={ranks} needs {count * ranks} GPUs"
        raise ValueError(f"{need}, but the Ray cluster has {available['GPU']:.0f}")
    return {"num_cpus": 1, "num_gpus": ranks}


class Work(NamedTuple):
    """A span, and how many engines have died while it was under way in them."""

    span: Span
    num_deaths: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it must be alone in its engine: if that dies, no other line can be the cause."""
        return self.num_deaths == MAX_ATTEMPTS - 1


@dataclass(eq=False)
class Member:
    """An engine of the pool."""

    actor: Any
    load: int  # lines under way; a suspect takes all the room, and so does the start
    num_deaths: int  # of engines before it in its place, since the last answer from any of them


class Pool:
    """
    The engines, and what they have under way. Spans to compute again come before new ones, and suspects last,
    when an engine has nothing else to do.
    """

    def __init__(self, args: Namespace, output: Output, progress: Any):
        self.args, self.progress = args, progress
        self.is_started = False
        self.num_missing = output.done.count(0)
        size = max(1, min(MAX_SPAN, self.num_missing // (args.data_parallel * SPANS_PER_ENGINE)))
        # Lines are not shuffled: neighbours in the input often begin alike, and those of a span go to one
        # engine, which finds their common beginning in its prefix cache.
        lines = read_lines(args.input, output.done)
        self.spans = iter(lambda: list(itertools.islice(lines, size)), [])
        self.again: deque[Work] = deque()
        self.suspects: deque[Work] = deque()
        # Lines that are done wait for the others of their span, so an engine gets more lines than it can run
        # at once, but never more than its share of the input.
        max_num_seqs = args.engine.get("max_num_seqs", Config.max_num_seqs)
        self.room = min(ROOM_FACTOR * max_num_seqs, -(-self.num_missing // args.data_parallel))  # lines
        self.actors = ray.remote(Engine).options(**_resources(args), max_concurrency=self.room)
        self.calls: dict[Any, tuple[Member, Work | None]] = {}  # under way; no work: the engine is starting
        self.members = [self._start() for _ in range(args.data_parallel)]

    def answers(self) -> Iterator[Answer]:
        """All answers, in the order in which their spans are done."""
        while self.num_missing and self._feed():
            [call], _ = ray.wait(list(self.calls))
            member, work = self.calls.pop(call)
            member.load -= self._load(work)
            try:
                answers = ray.get(call) or []  # none from a start
            except ray.exceptions.RayError as error:
                answers = self._recover(member, work, _cause_of_death(error))
            else:
                if work is not None:
                    member.num_deaths = 0
                elif not self.is_started:
                    self.is_started = True
                    self.progress.restart()
            self.num_missing -= len(answers)
            yield from answers

    def _start(self, num_deaths: int = 0) -> Member:
        model = self.args.model
        model = str(Path(model).resolve()) if Path(model).exists() else model
        actor = self.actors.remote(model, self.args)
        member = Member(actor, self.room, num_deaths)
        self.calls[actor.start.remote()] = member, None
        return member

    def _feed(self) -> bool:
        """Give the engines as much work as they have room for. False if nothing is under way afterwards."""
        for member in self.members:
            while member.load < self.room and (work := self._next(member)) is not None:
                member.load += self._load(work)
                self.calls[member.actor.answer.remote(work.span)] = member, work
        return bool(self.calls)

    def _next(self, member: Member) -> Work | None:
        if self.again:
            return self.again.popleft()
        if (span := next(self.spans, None)) is not None:
            return Work(span)
        return self.suspects.popleft() if self.suspects and not member.load else None

    def _load(self, work: Work | None) -> int:
        return self.room if work is None or work.is_suspect else len(work.span)

    def _recover(self, member: Member, work: Work | None, cause: str) -> list[Answer]:
        """Have another engine do what an engine that has died was doing. An answer if a line is to blame."""
        if member in self.members:  # else another call has reported this death
            self._replace(member, work, cause)
        if work is None:
            return []
        span, work = work.span, Work(work.span, work.num_deaths + 1)
        if work.num_deaths < MAX_ATTEMPTS:
            (self.suspects if work.is_suspect else self.again).append(work)
        elif len(span) > 1:
            self.progress.warn(f"{len(span)} lines from {span[0][0]} on are tried one by one")
            self.suspects.extend(Work([line], MAX_ATTEMPTS - 1) for line in span)
        else:
            [(line, text)] = span
            message = f"every engine that computed it has died: {cause}"
            return [answer_error(line, find_custom_id(text), message, "server_error")]
        return []

    def _replace(self, member: Member, work: Work | None, cause: str) -> None:
        ray.kill(member.actor)  # its process can outlive the engine
        num_deaths = member.num_deaths + 1
        if num_deaths == MAX_DEATHS:
            message = f"{num_deaths} engines in a row have died without an answer, the last: {cause}"
            raise RuntimeError(message)
        lost = [work, *(other for owner, other in self.calls.values() if owner is member)]
        num_lost = sum(len(work.span) for work in lost if work is not None)
        fate = f"an engine has died with {num_lost} lines under way, another takes its place"
        self.progress.warn(f"{fate}: {cause}")
        self.members[self.members.index(member)] = self._start(num_deaths)


def _cause_of_death(error: Exception) -> str:
    """Why an engine has died. Raises errors that another engine would have too, such as a bad option."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return str(error).strip().splitlines()[-1]
    if isinstance(error.cause, RuntimeError | MemoryError):
        return describe(error.cause)
    raise error.cause
