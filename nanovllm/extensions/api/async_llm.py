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
from nanovllm.extensions.api.engine_args import show_options
from nanovllm.extensions.api.foreign_options import missing_attribute
from nanovllm.extensions.text.chat import Messages
from nanovllm.llm import LLM, NOT_PICKLED, Params, takes_foreign_options
from nanovllm.text.prompts import Prompt, Request
from nanovllm.text.results import GrowingOutput, GrowingText, Piece, Result, make_score, outcome
from nanovllm.utils.validation import check

Event = str | Piece | Result | BaseException


@dataclass(eq=False)
class Listener:
    """A task waits for a request: `events` gets pieces, if there is a kind, then the result or an error."""

    request: Request
    kind: type[GrowingText | GrowingOutput] | None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    growing: GrowingText | GrowingOutput | None = None

    def hear(self, event: Event) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Worker:
    """The engine's thread. It holds no reference to the AsyncLLM, which could never be deleted otherwise."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.inbox: queue.SimpleQueue[tuple[Callable, Listener] | None] = queue.SimpleQueue()
        self.listeners: dict[int, Listener] = {}  # by the seq_id of each completion that is under way
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
        """Run a step of the engine, and tell those whose requests it has touched what is new."""
        finished, _ = self.llm.step(isolate=True)
        seq_ids = [*(seq.seq_id for seq in self.llm.drawn), *(seq_id for seq_id, _ in finished)]
        touched = [self.listeners[seq_id] for seq_id in seq_ids if seq_id in self.listeners]
        for listener in dict.fromkeys(touched):
            self.tell(listener)

    def add(self, listener: Listener) -> None:
        try:
            self.llm.add_request(listener.request)
            self.listeners.update((seq.seq_id, listener) for seq in listener.request.completions)
            if listener.kind is not None:
                listener.growing = listener.kind(self.llm.tokenizer, listener.request.completions[0])
        except BaseException as error:
            self.end(listener, error)

    def tell(self, listener: Listener) -> None:
        completions = listener.request.completions
        try:
            if listener.growing is not None and (piece := listener.growing.look()):
                listener.hear(piece)
            if all(seq.is_finished for seq in completions):
                self.end(listener, listener.request.label(outcome(self.llm.tokenizer, completions)))
            elif listener.loop.is_closed():
                for other in set(self.listeners.values()):  # also those that no step touches yet
                    if other.loop is listener.loop:
                        self.end(other)
        except Exception as error:  # a decoder's
            self.end(listener, error)

    def end(self, listener: Listener, event: Result | BaseException | None = None) -> None:
        """Forget a listener and end its request; the event is the last one that it gets."""
        for seq in listener.request.completions:
            self.listeners.pop(seq.seq_id, None)
        if event is not None:
            listener.hear(event)
        self.abort(listener)

    def abort(self, listener: Listener) -> None:
        """End a request; unless it is forgotten, its listener gets the result so far."""
        for seq in listener.request.completions:
            self.llm.abort(seq.seq_id)

    def fail(self, error: BaseException) -> None:
        listeners, self.listeners = self.listeners, {}
        for listener in set(listeners.values()):
            listener.hear(error)


@show_options
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
        self._named: dict[str, Listener] = {}  # those under way whose callers gave them an id
        self._end = weakref.finalize(self, self._worker.stop)  # also when the program ends

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(self, name)

    def __reduce__(self) -> Any:
        raise TypeError(NOT_PICKLED)

    @takes_foreign_options
    async def generate(
        self, prompt: Prompt, sampling_params: Params = None, request_id: str | None = None
    ) -> Result:
        """
        The result of one prompt, as `LLM.generate` describes it. Raises ValueError for a bad one. A
        `request_id` is a text that no other request has: the result has it, and `abort` takes it.
        """
        return await self._result(await self._read(prompt, sampling_params), request_id)

    async def chat(
        self, messages: Messages, sampling_params: Params = None,
        request_id: str | None = None, **options: Any,
    ) -> Result:  # fmt: skip
        """The result of one conversation, as `LLM.chat` describes it, with the options that it describes."""
        chats = self.llm.prompts.render_chats(messages, **options)
        if len(chats) > 1:
            message = f"messages must be one conversation, got {len(chats)}: call chat for each of them"
            raise ValueError(message)
        return await self.generate(chats[0], sampling_params, request_id)

    async def score(self, prompt: Prompt, from_token: int = 1) -> dict[str, Any]:
        """How likely the model finds a text, as `LLM.score` describes it."""
        [(token_ids, request)] = self.llm.prompts.read_scored([prompt], from_token)
        if request.own["scores"].is_open:
            await self._result(request)
        return make_score(token_ids, request)

    async def stream(
        self, prompt: Prompt, sampling_params: Params = None, objects: bool = False,
        request_id: str | None = None,
    ) -> AsyncIterator[str | Piece]:  # fmt: skip
        """One completion, piece by piece, as `LLM.stream` describes it."""
        request = await self._read(prompt, sampling_params)
        self.llm.prompts.check_streamable(request.params, objects)
        kind = GrowingOutput if objects else GrowingText
        async with contextlib.aclosing(self._events(request, kind, request_id)) as events:
            async for event in events:
                if not isinstance(event, Result):
                    yield event

    async def _read(self, prompt: Prompt, sampling_params: Params) -> Request:
        """`Prompts.read`, with what may take seconds done in another thread, so that other tasks go on."""
        prompts = self.llm.prompts
        request = prompts.read_at_once(prompt, sampling_params)
        if prompts.has_rest(request):
            await asyncio.to_thread(prompts.read_rest, request)
        return request

    async def _result(self, request: Request, request_id: str | None = None) -> Result:
        async for event in self._events(request, None, request_id):
            result = event
        return result

    async def _events(
        self, request: Request, kind: type[GrowingText | GrowingOutput] | None, request_id: str | None
    ) -> AsyncIterator[str | Piece | Result]:
        self.llm.check_usable()
        self.llm.prompts.warn_of_context([request])
        listener = Listener(request, kind)
        if request_id is not None:
            check(isinstance(request_id, str), "request_id must be a text", request_id)
            if self._named.setdefault(request_id, listener) is not listener:
                raise ValueError(f"request_id must be a new one, got that of another request: {request_id!r}")
            request.request_id = request_id
        self._worker.inbox.put((self._worker.add, listener))
        event: Event = ""
        try:
            if not self._end.alive:  # exit() was called: the thread may no longer read the inbox
                raise EngineDeadError(SHUT_DOWN)
            while not isinstance(event, Result):
                event = await listener.events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            if isinstance(event, str | Piece):  # left before the end
                self._worker.inbox.put((self._worker.end, listener))
            if request_id is not None:
                self._named.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """End the request that was given this id, if there is one; its result has the tokens so far."""
        if (listener := self._named.get(request_id)) is not None:
            self._worker.inbox.put((self._worker.abort, listener))

    def encode(self, text: str) -> list[int]:
        """`LLM.encode`."""
        return self.llm.encode(text)

    def stats(self) -> dict[str, float]:
        """`LLM.stats`."""
        return self.llm.stats()

    def get_tokenizer(self) -> Any:
        """`LLM.get_tokenizer`."""
        return self.llm.get_tokenizer()

    def exit(self) -> None:
        """End the engine, and every request under way with an EngineDeadError. May be called twice."""
        self._end()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.exit()
