"""An asyncio front: many requests at once over one engine, which runs in a thread of its own.

Coroutines and the thread meet in two places only: an inbox of commands, and the events of each request, which
are handed to the request's event loop.
"""

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.distributed.ranks import SHUT_DOWN, EngineDeadError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, Request
from nanovllm.text.results import GrowingText, outcome


@dataclass(eq=False)
class Listener:
    """A task waits for a request: `events` gets pieces of text, if wanted, then the result or an error."""

    request: Request
    wants_text: bool
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue[str | dict | BaseException] = field(default_factory=asyncio.Queue)
    text: GrowingText | None = None

    def hear(self, event: str | dict | BaseException) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Worker:
    """The engine's thread. It holds no reference to the AsyncLLM, which could never be deleted otherwise."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.inbox: queue.SimpleQueue[tuple[Callable, Listener] | None] = queue.SimpleQueue()
        self.listeners: dict[Listener, None] = {}  # whose requests are under way
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the engine, and every request under way with an EngineDeadError."""
        self.inbox.put(None)
        if threading.current_thread() is self.thread:  # the garbage collector calls, and then deletes `llm`
            return
        self.thread.join()
        self.llm.exit()
        while not self.inbox.empty():  # commands that came too late
            if (command := self.inbox.get()) is not None:
                command[1].hear(EngineDeadError(SHUT_DOWN))

    def run(self) -> None:
        """Do what the inbox says, step, tell the listeners what is new; sleep when all is done."""
        while True:
            try:
                with contextlib.suppress(queue.Empty):
                    while (command := self.inbox.get(block=self.llm.is_finished())) is not None:
                        function, listener = command
                        function(listener)
                    self.fail(EngineDeadError(SHUT_DOWN))
                    return
                self.llm.step(isolate=True)
                for listener in list(self.listeners):
                    self.tell(listener)
            except BaseException as error:
                with contextlib.suppress(Exception):  # if that fails too, so will the next step
                    self.llm.clear()
                self.fail(error)

    def add(self, listener: Listener) -> None:
        self.listeners[listener] = None  # first, so that whatever goes wrong from here on reaches it
        try:
            self.llm.add_request(listener.request)
            if listener.wants_text:
                listener.text = GrowingText(self.llm.tokenizer, listener.request.completions[0])
        except Exception as error:
            self.end(listener, error)

    def tell(self, listener: Listener) -> None:
        completions = listener.request.completions
        try:
            if listener.text is not None and (piece := listener.text.look()):
                listener.hear(piece)
            if all(seq.is_finished for seq in completions):
                self.end(listener, outcome(self.llm.tokenizer, completions))
            elif listener.loop.is_closed():
                self.end(listener)
        except Exception as error:  # a decoder's
            self.end(listener, error)

    def end(self, listener: Listener, event: dict | Exception | None = None) -> None:
        """Forget a listener and end its request; the event is the last one that it gets."""
        self.listeners.pop(listener, None)
        if event is not None:
            listener.hear(event)
        for seq in listener.request.completions:
            self.llm.abort(seq.seq_id)

    def fail(self, error: BaseException) -> None:
        listeners, self.listeners = self.listeners, {}
        for listener in listeners:
            listener.hear(error)


class AsyncLLM:
    """
    `AsyncLLM(model, **options)`: options are those of `LLM`. Requests of any number of tasks run together.

    A task that is cancelled, or leaves its `async for`, takes its request with it: the blocks are free at
    once. An exception that one request causes, such as running out of memory, is raised in its task alone;
    any other in all tasks under way, and then the engine is empty and usable unless it is an EngineDeadError.
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
        request = self.llm.prompts.read(prompt, params)
        if wants_text:
            self.llm.prompts.check_streamable(params)
        self.llm.prompts.warn_of_context([request])
        listener = Listener(request, wants_text)
        self._worker.inbox.put((self._worker.add, listener))
        event: str | dict | BaseException = ""
        try:
            if not self._end.alive:  # exit() was called: the thread may no longer read the inbox
                raise EngineDeadError(SHUT_DOWN)
            while isinstance(event, str):
                event = await listener.events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            if isinstance(event, str):  # left before the end
                self._worker.inbox.put((self._worker.end, listener))

    def exit(self) -> None:
        """End the engine, and every request under way with an EngineDeadError. May be called twice."""
        self._end()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.exit()
