"""An asyncio front: many requests at once over one engine, which runs in a thread of its own.

Coroutines and the thread meet in two places only: an inbox of commands, and the events of each request, which
are handed to the request's event loop.
"""

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.distributed.ranks import SHUT_DOWN, EngineDeadError
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.extensions.api.engine_args import show_options
from nanovllm.extensions.api.foreign_options import takes_foreign
from nanovllm.extensions.api.llm import NotCopied
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.validation import check

Params = SamplingParams | None  # None is what the checkpoint recommends


@dataclass(eq=False)
class Listener:
    """
    A task waits for a request: `events` gets pieces, if it grows in pieces, then the last event: its
    completions or an error.
    """

    request: Request
    objects: bool | None = None  # whether pieces are objects; None: there are none
    completions: list[Sequence] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    take_delta: Callable[[], Any] | None = None

    async def next_event(self) -> Any:
        """Called by the task. Raises an event that is an error."""
        if isinstance(event := await self.events.get(), BaseException):
            raise event
        return event

    def on_event(self, event: Any) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Worker:
    """The engine's thread. It holds no reference to the AsyncLLM, which could never be deleted otherwise."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.inbox: queue.SimpleQueue[tuple[Callable, Listener] | None] = queue.SimpleQueue()
        self.listeners: dict[int, Listener] = {}  # by the seq_id of each completion in flight
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def shut_down(self) -> None:
        """End the engine, and every request in flight with an EngineDeadError."""
        self.inbox.put(None)
        if threading.current_thread() is self.thread:  # the garbage collector calls, and then deletes `llm`
            return
        self.thread.join()
        self.llm.exit()

    def run(self) -> None:
        """Do what the inbox says, step; sleep when all is done."""
        while True:
            try:
                with contextlib.suppress(queue.Empty):
                    while (command := self.inbox.get(block=self.llm.is_finished())) is not None:
                        function, listener = command
                        function(listener)
                        del command, function, listener  # a wait for the next one keeps no request alive
                    self.fail(EngineDeadError(SHUT_DOWN))
                    return
                self.step()
            except BaseException as error:
                with contextlib.suppress(Exception):  # if that fails too, so will the next step
                    self.llm.clear()
                self.fail(error)

    def step(self) -> None:
        """Run a step of the engine, and notify those whose requests it has touched of what is new."""
        finished, _ = self.llm.step_or_isolate()
        seq_ids = [*(seq.seq_id for seq in self.llm.scheduler.running), *(seq_id for seq_id, _ in finished)]
        touched = filter(None, map(self.listeners.get, seq_ids))
        for listener in dict.fromkeys(touched):
            self.notify(listener)

    def add(self, listener: Listener) -> None:
        try:
            listener.completions = self.llm.queue(listener.request)
            self.listeners.update((seq.seq_id, listener) for seq in listener.completions)
            if listener.objects is not None:
                listener.take_delta = self.llm.growing(listener.completions[0], listener.objects)
        except BaseException as error:
            self.end(listener, error)

    def notify(self, listener: Listener) -> None:
        try:
            if listener.take_delta is not None and (piece := listener.take_delta()):
                listener.on_event(piece)
            if all(seq.is_finished for seq in listener.completions):
                self.end(listener, self.llm.outcome(listener.completions))
            elif listener.loop.is_closed():
                for other in set(self.listeners.values()):  # also those that no step touches yet
                    if other.loop is listener.loop:
                        self.end(other)
        except Exception as error:  # a decoder's
            self.end(listener, error)

    def end(self, listener: Listener, event: Any = None) -> None:
        """Forget a listener and end its request; the event is the last one that it gets."""
        for seq in listener.completions:
            self.listeners.pop(seq.seq_id, None)
        if event is not None:
            listener.on_event(event)
        self.abort(listener)

    def abort(self, listener: Listener) -> None:
        """End a request; unless it is forgotten, its listener gets the result so far."""
        for seq in listener.completions:
            self.llm.abort(seq.seq_id)

    def fail(self, error: BaseException) -> None:
        listeners, self.listeners = self.listeners, {}
        for listener in set(listeners.values()):
            listener.on_event(error)


@show_options
class AsyncLLM(NotCopied):
    """
    `AsyncLLM(model, **options)`: options are those of `LLM`. Requests of any number of tasks run together.
    `encode`, `stats` and `get_tokenizer` are those of `LLM`, too.

    A task that is cancelled, or leaves its `async for`, takes its request with it: the blocks are free at
    once. An exception that one request causes, such as running out of memory, is raised in its task alone;
    any other in all tasks in flight, and then the engine is empty and usable unless it is an EngineDeadError.
    """

    def __init__(self, model: str, **options: Any):
        self.llm = LLM(model, **options)
        self._worker = Worker(self.llm)
        self.encode, self.stats, self.get_tokenizer = self.llm.encode, self.llm.stats, self.llm.get_tokenizer
        self._named: dict[str, Listener] = {}  # those in flight whose callers gave them an id
        self._end = weakref.finalize(self, self._worker.shut_down)  # also when the program ends

    @takes_foreign
    async def generate(
        self, prompt: Any, sampling_params: Params = None, request_id: str | None = None
    ) -> dict[str, Any]:
        """
        The result of one prompt, as `LLM.generate` describes it. Raises ValueError for a bad one. A
        `request_id` is a text that no other request has: the result has it, and `abort` takes it.
        """
        with self._in_flight(await self._read(prompt, sampling_params), request_id) as listener:
            result = await listener.next_event()
        if request_id is not None:
            result.request_id = request_id
        return result

    async def chat(
        self, messages: Any, sampling_params: Params = None, request_id: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """The result of one conversation, as `LLM.chat` describes it, with the options that it describes."""
        chats = self.llm.prompts.render_chats(messages, **options)
        if len(chats) > 1:
            raise ValueError(
                f"messages must be one conversation, got {len(chats)}: call chat for each of them"
            )
        return await self.generate(chats[0], sampling_params, request_id)

    async def score(self, prompt: Any, from_token: int = 1) -> dict[str, Any]:
        """How likely the model finds a text, as `LLM.score` describes it."""
        [(token_ids, request)] = self.llm.prompts.read_scored([prompt], from_token)
        if request.own["scores"].is_open:
            with self._in_flight(request) as listener:
                await listener.next_event()
        return self.llm.make_score(token_ids, request)

    async def stream(
        self,
        prompt: Any,
        sampling_params: Params = None,
        objects: bool = False,
        request_id: str | None = None,
    ) -> AsyncIterator[Any]:
        """One completion, piece by piece, as `LLM.stream` describes it."""
        request = await self._read(prompt, sampling_params)
        self.llm.prompts.check_streamable(request.params, objects)
        with self._in_flight(request, request_id, objects) as listener:
            while not hasattr(event := await listener.next_event(), "finished"):
                yield event

    async def _read(self, prompt: Any, sampling_params: Params) -> Request:
        """A request. What may take seconds is done in another thread: other tasks go on."""
        prompts = self.llm.prompts
        params = prompts.read_params(self.llm.or_recommended(sampling_params), "prompt")
        if prompts.is_slow(params):
            return await asyncio.to_thread(prompts.make_request, prompt, params, "prompt")
        return prompts.make_request(prompt, params, "prompt")

    @contextlib.contextmanager
    def _in_flight(
        self, request: Request, request_id: str | None = None, objects: bool | None = None
    ) -> Iterator[Listener]:
        """Queue a request, which ends when its task leaves."""
        self.llm.check_usable()
        self.llm.prompts.warn_of_context([request])
        listener = Listener(request, objects)
        if request_id is not None:
            check(isinstance(request_id, str), "request_id must be a text", request_id)
            if self._named.setdefault(request_id, listener) is not listener:
                raise ValueError(f"request_id must be a new one, got that of another request: {request_id!r}")
        self._worker.inbox.put((self._worker.add, listener))
        try:
            if not self._end.alive:  # exit() was called: the thread may no longer read the inbox
                raise EngineDeadError(SHUT_DOWN)
            yield listener
        finally:
            self._worker.inbox.put((self._worker.end, listener))
            if request_id is not None:
                self._named.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """End the request that was given this id, if there is one; its result has the tokens so far."""
        if (listener := self._named.get(request_id)) is not None:
            self._worker.inbox.put((self._worker.abort, listener))

    def exit(self) -> None:
        """End the engine, and every request in flight with an EngineDeadError. May be called twice."""
        self._end()

    __enter__, __exit__ = LLM.__enter__, LLM.__exit__
