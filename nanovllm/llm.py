"""What users call: turns prompts into requests, steps until they have ended, and turns tokens into text.

Follow `LLM.generate` downwards: `LLMEngine.step` is next.
"""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

from nanovllm.assembly import assemble, open_model
from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.extensions.api.engine_args import show_options
from nanovllm.extensions.api.foreign_options import missing_attribute, takes_foreign
from nanovllm.extensions.text.chat import Messages
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, Request, as_token_ids
from nanovllm.text.results import GrowingOutput, GrowingText, Piece, Result, make_result, make_score, outcome
from nanovllm.utils.progress import MakeBar, Progress, bar_maker
from nanovllm.utils.validation import check, check_bool, is_number

NOT_PICKLED = "an engine cannot be pickled or copied: make one in each process that uses one, or share one \
among the tasks of a process with AsyncLLM"
Params = SamplingParams | None  # None is what the checkpoint recommends
takes_foreign_options = functools.partial(takes_foreign, sampling=SamplingParams.__struct_fields__)


@show_options
class LLM(LLMEngine):
    """
    `LLM(model, **options)`: options are the fields of `Config`. It belongs to the process that made it, and
    does one call at a time; `AsyncLLM` serves many tasks.

    After any exception inside `generate` and its kin the engine is empty and usable: no request left, all
    blocks free.
    """

    assembly = f"{assemble.__module__}:{assemble.__name__}"
    open_model = staticmethod(open_model)
    _call: dict[int, Request] | None = None  # the call that the unfinished requests belong to, see _take_turn
    _process_id = -1  # of the process that made it

    def __init__(self, model: str | os.PathLike, **options: Any):
        self._process_id = os.getpid()
        self._own_ids: dict[int | str, int | str] = {}  # caller's id -> engine's, and the other way round
        super().__init__(model, **options)

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(self, name)

    def __reduce__(self) -> Any:
        raise TypeError(NOT_PICKLED)

    def check_usable(self) -> None:
        """`LLMEngine.check_usable`. Raises EngineDeadError also in a fork: its threads are not there."""
        if self._is_fork():
            raise EngineDeadError(
                f"this engine belongs to process {self._process_id}, and this is process {os.getpid()}, a "
                "fork of it: make an engine in the process that is to use it"
            )
        super().check_usable()

    def exit(self) -> None:
        """`LLMEngine.exit`; does nothing in a fork of the process that has the engine."""
        if not self._is_fork():
            super().exit()

    def clear(self) -> None:
        """`LLMEngine.clear`; does nothing in a fork of the process that has the engine."""
        if not self._is_fork():
            super().clear()

    def _is_fork(self) -> bool:
        return self._process_id != os.getpid()

    @takes_foreign_options
    def generate(
        self, prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | list[SamplingParams] = None, use_tqdm: bool | MakeBar = True,
    ) -> list[Result]:  # fmt: skip
        """
        Complete the prompts; results are in their order.

        prompts: a string, token ids, or a dict with "prompt" or "prompt_token_ids" (or both: then the ids
        count), or a list of such; a list may also be an array, a column of a table, a generator and the like.
        sampling_params: one for all, or one each; None is what the checkpoint recommends. Raises a ValueError
        that names the wrong prompt or parameter, before anything is computed. Warns of a max_tokens that
        reaches beyond the context, at whose end a completion ends.
        use_tqdm: whether there is a progress bar; or what makes it, as tqdm does.

        Every result is a dict with
          text, token_ids    the completion; token_ids include what ended it
          finish_reason      "stop" (an end-of-sequence token, a stop text or token), "length" or "abort"
          stop_reason        the stop text or stop token id that ended it, else None
          num_prompt_tokens, num_cached_tokens   of the prompt, and how many of these the KV cache had
          outputs            with n > 1 all completions; the keys above are the first one's
        and where parameters ask for them
          logprobs           for each token of the completion a dict {token id: Logprob} of it and of the
                             likeliest ones, each with logprob, rank (1 is the likeliest) and decoded_token
          prompt_logprobs    the same for the prompt, whose first token has None
        All of these are attributes, too. As attributes only it has prompt (the text), prompt_token_ids,
        request_id, finished and, for any n, outputs, which have an index and a cumulative_logprob besides.
        """
        found = sorted(self.generate_iter(prompts, sampling_params, use_tqdm), key=itemgetter(0))
        return [result for _, result in found]

    @takes_foreign_options
    def generate_iter(
        self, prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | list[SamplingParams] = None, use_tqdm: bool | MakeBar = False,
    ) -> Iterator[tuple[int, Result]]:  # fmt: skip
        """
        Like `generate`, but yields (index of the prompt, result) as soon as a prompt is done. Nothing is
        computed unless the next result is asked for, and closing the iterator drops what is left. Until the
        last result other calls raise a RuntimeError.
        """
        self._take_turn()
        make_bar = bar_maker(use_tqdm)
        requests = self.prompts.read_all(prompts, sampling_params)
        total = sum(request.params.n for request in requests)
        return self._results(self._run(requests, total=total, make_bar=make_bar), make_result)

    def generate_from(
        self, requests: Iterable[tuple[Prompt, SamplingParams]],
        max_unfinished: int | None = None, return_exceptions: bool = False,
    ) -> Iterator[tuple[int, Result | Exception]]:  # fmt: skip
        """
        `generate_iter` for any number of requests in bounded memory: the next is taken from `requests` only
        while fewer than `max_unfinished` completions (default: twice max_num_seqs) are queued or running. A
        bad request raises a ValueError when its turn comes. With `return_exceptions` a request that is bad,
        or fails for reasons of its own such as its size, yields (index, exception) and the others go on.
        """
        limit = 2 * self.config.max_num_seqs if max_unfinished is None else max_unfinished
        check(is_number(limit, int, 1), "max_unfinished must be an integer of at least 1", limit)
        check_bool(return_exceptions, "return_exceptions")
        coming = self._read_each(requests, return_exceptions)
        make = outcome if return_exceptions else make_result
        return self._results(self._run(coming, limit, return_exceptions), make)

    def _read_each(self, requests: Iterable[Any], return_exceptions: bool) -> Iterator[Request]:
        has_warned = False
        for i, request in enumerate(requests):
            try:
                is_pair = isinstance(request, tuple) and len(request) == 2
                check(is_pair, f"requests[{i}] must be (prompt, SamplingParams)", request)
                request = self.prompts.read(*request, i)
                which = f"prompts[{i}], and maybe later ones"
                has_warned = has_warned or self.prompts.warn_of_context([request], which)
            except ValueError as error:
                if not return_exceptions:
                    raise
                request = Request(index=i, error=error)
            yield request

    def _results(self, steps: Iterator[list[Request]], make: Callable) -> Iterator[tuple[int, Any]]:
        with contextlib.closing(steps):
            for request in itertools.chain.from_iterable(steps):
                yield request.index, request.error or request.label(make(self.tokenizer, request.completions))

    @takes_foreign_options
    def stream(
        self, prompt: Prompt, sampling_params: Params = None, objects: bool = False
    ) -> Iterator[str | Piece]:
        """
        The text of one completion, piece by piece while it is made. Pieces are whole characters; joined they
        are the "text" of `generate`. With `objects` each is a `Piece`: text, token_ids, logprobs where asked
        for, and in the last one the finish_reason. Closing the iterator drops the request.
        """
        self._take_turn()
        request = self.prompts.read(prompt, sampling_params)
        self.prompts.check_streamable(request.params, objects)
        self.prompts.warn_of_context([request])
        return self._pieces(request, GrowingOutput if objects else GrowingText)

    def _pieces(self, request: Request, kind: type[GrowingText | GrowingOutput]) -> Iterator[str | Piece]:
        growing = None
        with contextlib.closing(self._run([request])) as steps:
            for _ in steps:
                growing = growing or kind(self.tokenizer, request.completions[0])
                if piece := growing.look():
                    yield piece

    def score(
        self, prompts: Prompt | Iterable[Prompt],
        use_tqdm: bool | MakeBar = True, from_token: int | list[int] = 1,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """
        How likely the model finds texts (or token ids, or dicts as for `generate`), from this token of theirs
        on (one for all, or one each). What lies before it comes from the KV cache where that has it: texts
        that begin alike compute their beginning once. Every result has
          token_ids        of the text
          token_logprobs   natural logarithm of each token's probability after those before it; None for the
                           first, and for those before from_token
          token_ranks      their ranks, 1 for the likeliest token; None likewise
          logprob          the sum of the logarithms
        """
        make_bar = bar_maker(use_tqdm)
        scored = self.prompts.read_scored(prompts, from_token)
        requests = [request for _, request in scored if request.own["scores"].is_open]
        for _ in self._run(requests, total=len(requests), make_bar=make_bar):
            pass
        return list(itertools.starmap(make_score, scored))

    @takes_foreign_options
    def chat(
        self, messages: Messages | Iterable[Messages],
        sampling_params: Params | list[SamplingParams] = None, use_tqdm: bool | MakeBar = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None, chat_template_kwargs: dict[str, Any] | None = None,
        chat_template_content_format: str = "auto",
    ) -> list[Result]:  # fmt: skip
        """
        `generate` for one conversation or a list of them, through the checkpoint's chat template or the one
        given. The answer is a new message; with continue_final_message=True and add_generation_prompt=False
        it continues the last one. Other variables of the template (such as enable_thinking) go into
        chat_template_kwargs.

        A content is a string or a list of parts {"type": "text", "text": ...}. The template gets what it is
        found to take, unless chat_template_content_format says "string" (parts are joined by line feeds) or
        "openai" (all are lists of parts).
        """
        options = (chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        chats = self.prompts.render_chats(messages, *options, chat_template_content_format)
        return self.generate(chats, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers, or None if the checkpoint has none."""
        return self.tokenizer

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, the same as when it is a prompt."""
        check(isinstance(text, str), "text must be a string", text)
        return self.prompts.tokenize(text, "text")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model!r} has no tokenizer")
        check(isinstance(token_ids, (list, tuple)), "token_ids must be a list of token ids", token_ids)
        check_bool(skip_special_tokens, "skip_special_tokens")
        vocab_size = max(self.prompts.vocab_size, len(self.tokenizer))  # either may have more
        token_ids = as_token_ids(token_ids, vocab_size, "token_ids")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends. Raises ValueError for a bad value."""
        return self.prompts.recommended()

    get_default_sampling_params = default_sampling_params

    def add_request(
        self, prompt: Prompt | Request, sampling_params: Params = None, request_id: str | None = None
    ) -> int | str:
        """
        `LLMEngine.add_request`. The id may be the caller's own: a text that no unfinished request has. Raises
        RuntimeError while the requests of another call are unfinished.
        """
        self._take_turn()
        if request_id is None:
            return super().add_request(prompt, sampling_params)
        check(isinstance(request_id, str), "request_id must be a text", request_id)
        if self._own_ids.get(request_id) in self.unfinished:
            message = f"request_id must be a new one, got that of an unfinished request: {request_id!r}"
            raise ValueError(message)
        if self.is_finished():
            self._own_ids.clear()
        seq_id = super().add_request(prompt, sampling_params)
        self._own_ids |= {request_id: seq_id, seq_id: request_id}
        return request_id

    def abort(self, request_id: int | str) -> None:
        """`LLMEngine.abort`."""
        is_own = isinstance(request_id, str) and request_id in self._own_ids
        super().abort(self._own_ids[request_id] if is_own else request_id)

    def step(self, isolate: bool = False) -> tuple[list[tuple[int | str, list[int]]], int]:
        """`LLMEngine.step`. Raises RuntimeError while the requests of another call are unfinished."""
        self._take_turn()
        finished, num_tokens = super().step(isolate)
        return [(self._own_ids.get(i, i), token_ids) for i, token_ids in finished], num_tokens

    def _take_turn(self, call: dict[int, Request] | None = None) -> None:
        """
        Only one call at a time may use the engine, until its requests have ended. A call is identified by its
        dict of queued requests; None stands for `add_request` and `step`.
        """
        self.check_usable()
        if self.unfinished and self._call is not call:
            raise RuntimeError(
                "the engine is not idle: busy with the unfinished requests of another call. AsyncLLM takes "
                "many calls at once; or make another engine, in a process of its own"
            )
        self._call = call

    def _run(
        self, coming: Iterable[Request],
        max_unfinished: int | None = None, isolate: bool = False,
        total: int | None = None, make_bar: MakeBar | None = None,
    ) -> Iterator[list[Request]]:  # fmt: skip
        """
        Queue requests while there is room, and step, until all have ended. Yields the requests that a step
        has ended, after each step, and a request that could not be read, at once. A progress
        bar counts the completions up to `total`, if something makes it.
        """
        queued: dict[int, Request] = {}  # by the seq_id of each completion that has not ended
        coming, limit = iter(coming), max_unfinished or 2 * self.config.max_num_seqs
        self._take_turn(queued)
        try:
            progress = Progress(total, make_bar)
            with contextlib.closing(progress.bar):
                while True:
                    ended = self._queue(coming, limit, queued)
                    if not ended:
                        if not queued or self.is_finished():
                            return
                        self._take_turn(queued)
                        start = time.perf_counter()
                        finished, num_tokens = super().step(isolate)
                        progress.count(len(finished), num_tokens, time.perf_counter() - start)
                        found = dict.fromkeys(queued.pop(i) for i, _ in finished if i in queued)
                        ended = [r for r in found if all(seq.is_finished for seq in r.completions)]
                    yield ended
        except BaseException:
            if self._call is queued:  # an iterator may be closed when another call uses the engine
                self.clear()
            raise

    def _queue(self, coming: Iterator[Request], limit: int, queued: dict[int, Request]) -> list[Request]:
        """Queue requests until `limit` completions are queued, or up to one that could not be read."""
        while len(queued) < limit and (request := next(coming, None)) is not None:
            if request.error is not None:
                return [request]
            self._take_turn(queued)
            super().add_request(request)
            queued.update((seq.seq_id, request) for seq in request.completions)
        return []
