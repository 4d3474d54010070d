"""An asyncio front: many requests at once over one engine, which runs in a thread of its own.

Coroutines and the thread meet in two places only: an inbox of commands, and the events of each request, which
are handed to the request's event loop.
"""

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

from nanovllm.distributed.ranks import SHUT_DOWN, EngineDeadError
from nanovllm.engine.isolation import Isolation, outcome
from nanovllm.engine.sequence import Sequence
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt
from nanovllm.text.results import GrowingText


class Request:
    """`events` gets pieces of text, where they are wanted, and in the end the result or an exception."""

    def __init__(self, token_ids: list[int], params: SamplingParams, wants_text: bool):
        self.token_ids = token_ids
        self.params = params
        self.wants_text = wants_text
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[str | dict | BaseException] = asyncio.Queue()
        self.sequences: list[Sequence] = []
        self.text: GrowingText | None = None

    def report(self, event: str | dict | BaseException) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Worker:
    """The engine's thread. It knows nothing of the AsyncLLM, which could not be deleted otherwise."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.inbox: queue.SimpleQueue[tuple[str, Request] | None] = queue.SimpleQueue()
        self.requests: dict[Request, None] = {}  # those under way
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the engine, and every request under way with an EngineDeadError."""
        self.inbox.put(None)
        if threading.current_thread() is self.thread:  # the garbage collector came by; `llm` goes with it
            return
        self.thread.join()
        self.llm.exit()
        while not self.inbox.empty():  # came too late
            if (command := self.inbox.get()) is not None:
                command[1].report(EngineDeadError(SHUT_DOWN))

    def run(self) -> None:
        """Do what the inbox says, step, tell the requests what is new; sleep when all is done."""
        isolation = Isolation(self.llm)
        while True:
            try:
                with contextlib.suppress(queue.Empty):
                    while (command := self.inbox.get(block=self.llm.is_finished())) is not None:
                        self.do(*command)
                    self.fail(EngineDeadError(SHUT_DOWN))
                    return
                isolation.step()
                self.report()
            except BaseException as error:
                with contextlib.suppress(Exception):  # if that fails too, so will the next step
                    self.llm.clear()
                self.fail(error)

    def do(self, command: str, request: Request) -> None:
        if command == "abort":
            self.end(request)
            return
        self.requests[request] = None  # first of all: whatever goes wrong now must reach it
        try:
            request.sequences = self.llm._enqueue_all(request.token_ids, request.params)
            if request.wants_text:
                request.text = GrowingText(self.llm.tokenizer, request.sequences[0])
        except Exception as error:
            self.end(request, error)

    def report(self) -> None:
        for request in list(self.requests):
            try:
                self.tell(request)
            except Exception as error:  # a decoder's
                self.end(request, error)

    def tell(self, request: Request) -> None:
        if request.text is not None and (piece := request.text.look()):
            request.report(piece)
        if all(seq.is_finished for seq in request.sequences):
            self.end(request, outcome(self.llm.tokenizer, request.sequences))
        elif request.loop.is_closed():
            self.end(request)

    def end(self, request: Request, event: dict | Exception | None = None) -> None:
        """Let go of a request; the event is the last that it is told."""
        self.requests.pop(request, None)
        if event is not None:
            request.report(event)
        for seq in request.sequences:
            self.llm.abort(seq.seq_id)

    def fail(self, error: BaseException) -> None:
        requests, self.requests = self.requests, {}
        for request in requests:
            request.report(error)


class AsyncLLM:
    """
    `AsyncLLM(model, **options)`: options are those of `LLM`. Requests of any number of tasks run together.

    A task that is cancelled, or leaves its `async for`, takes its request with it: the blocks are free at
    once. An exception that one request causes, such as running out of memory, is raised to its task alone;
    any other to all tasks under way, and unless it is an EngineDeadError the engine is empty and usable then.
    """

    def __init__(self, model: str, **options: Any):
        self.llm = LLM(model, **options)
        self._worker = Worker(self.llm)
        self._end = weakref.finalize(self, self._worker.stop)  # also when the program ends

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams = SamplingParams()
    ) -> dict[str, Any]:
        """The result of one prompt, as `LLM.generate` describes it. Raises ValueError for a bad one."""
        async for event in self._events(prompt, sampling_params, wants_text=False):
            result = event
        return result

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams = SamplingParams()
    ) -> AsyncIterator[str]:
        """The text of one completion, piece by piece, as `LLM.stream` describes it."""
        async with contextlib.aclosing(self._events(prompt, sampling_params, wants_text=True)) as events:
            async for event in events:
                if isinstance(event, str):
                    yield event

    async def _events(
        self, prompt: Prompt, params: SamplingParams, wants_text: bool
    ) -> AsyncIterator[str | dict[str, Any]]:
        self.llm._check_usable()
        request = Request(self.llm.prompts.read(prompt, params), params, wants_text)
        if wants_text:
            self.llm.prompts.check_streamable(params)
        self.llm.prompts.warn_of_context([(request.token_ids, params)])
        self._worker.inbox.put(("add", request))
        event: str | dict | BaseException = ""
        try:
            self.llm._check_usable()  # if it was shut down meanwhile, nobody may have seen the request
            while isinstance(event, str):
                event = await request.events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            if isinstance(event, str):  # left before the end
                self._worker.inbox.put(("abort", request))

    def exit(self) -> None:
        """End the engine, and every request under way with an EngineDeadError. May be called twice."""
        self._end()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.exit()
