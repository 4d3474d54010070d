"""More ways to call the engine: results one by one, text piece by piece, conversations, several completions
of a prompt, scores.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.input_processor import as_token_ids
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.extensions.text.chat import Messages
from nanovllm.extensions.text.prompts import Prompt, TextInputProcessor
from nanovllm.extensions.text.results import GrowingText, Piece, Result, make_result, make_score
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.progress import LOOK, Progress
from nanovllm.utils.validation import check, check_bool, is_number

Prompts = Prompt | Iterable[Prompt]
Params = SamplingParams | None  # None is what the checkpoint recommends
ParamsOfAll = Params | list[SamplingParams]
MakeBar = Callable[..., tqdm]
UseBar = bool | MakeBar


@dataclass(eq=False)
class Asked:
    """A prompt of a call: the request that it was read as, or the error; once queued, its completions."""

    request: Request | None = None
    index: int = 0  # among the prompts of its call
    error: Exception | None = None
    completions: list[Sequence] = field(default_factory=list)


def _bar_maker(use_tqdm: UseBar) -> MakeBar:
    """What makes the progress bar, which may be hidden."""
    if callable(use_tqdm):
        return use_tqdm
    rule = "use_tqdm must be True, False or what makes a bar as tqdm does"
    check(isinstance(use_tqdm, bool), rule, use_tqdm)
    return tqdm if use_tqdm else no_bar


# What hides it; what shows it leaves that to tqdm, which heeds TQDM_DISABLE.
no_bar = functools.partial(tqdm, disable=True)


class TextLLM(LLMEngine):
    """After any exception inside `generate` and its kin the engine is empty and usable."""

    make_prompts = TextInputProcessor
    step_or_isolate: Callable  # `step` that ends a request which makes steps fail, see extensions/safety
    # Begins or goes on with a call that uses the engine, see extensions/api. A call is identified by its dict
    # of queued requests, which is then in `_call`; None stands for `add_request` and `step`.
    _take_turn: Callable
    or_recommended: Callable  # the parameters of a call, or those that a checkpoint recommends for None
    is_generating = False  # whether `generate` runs, and none of its caller's code between two steps

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ParamsOfAll = None,
        use_tqdm: UseBar = True,
    ) -> list[Result]:
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
        results = self.generate_iter(prompts, sampling_params, use_tqdm)
        self.is_generating = isinstance(use_tqdm, bool)  # another bar is the caller's code
        try:
            return [result for _, result in sorted(results, key=itemgetter(0))]
        finally:
            self.is_generating = False

    def generate_iter(
        self,
        prompts: Prompts,
        sampling_params: ParamsOfAll = None,
        use_tqdm: UseBar = False,
    ) -> Iterator[tuple[int, Result]]:
        """
        Like `generate`, but yields (index of the prompt, result) as soon as a prompt is done. Nothing is
        computed unless the next result is asked for, and closing the iterator drops what is left. Until the
        last result other calls raise a RuntimeError.
        """
        self._take_turn()
        make_bar = _bar_maker(use_tqdm)
        requests = self.prompts.read_all(prompts, self.or_recommended(sampling_params))
        total = sum(request.params.n for request in requests)
        asked = [Asked(request, i) for i, request in enumerate(requests)]
        return self._results(self._run(asked, total=total, make_bar=make_bar))

    def generate_from(
        self,
        requests: Iterable[tuple[Prompt, SamplingParams]],
        max_unfinished: int | None = None,
        return_exceptions: bool = False,
    ) -> Iterator[tuple[int, Result | Exception]]:
        """
        `generate_iter` for any number of requests in bounded memory: the next is taken from `requests` only
        while fewer than `max_unfinished` completions (default: twice max_num_seqs) are queued or running. A
        bad request raises a ValueError when its turn comes. With `return_exceptions` a request that is bad,
        or fails for reasons of its own such as its size, yields (index, exception) and the others go on.
        """
        if max_unfinished is not None:
            rule = "max_unfinished must be an integer of at least 1"
            check(is_number(max_unfinished, int, 1), rule, max_unfinished)
        check_bool(return_exceptions, "return_exceptions")
        steps = self._run(self._read_each(requests), max_unfinished, return_exceptions)
        return self._results(steps, return_exceptions)

    def _read_each(self, requests: Iterable[Any]) -> Iterator[Asked]:
        has_warned = False
        for i, request in enumerate(requests):
            asked = Asked(index=i)
            try:
                is_pair = isinstance(request, tuple) and len(request) == 2
                check(is_pair, f"requests[{i}] must be (prompt, SamplingParams)", request)
                asked.request = self.prompts.read(*request, f"prompts[{i}]")
                which = f"prompts[{i}], and maybe later ones"
                has_warned = has_warned or self.prompts.warn_of_context([asked.request], which)
            except ValueError as error:
                asked.error = error
            yield asked

    def _results(
        self, steps: Iterator[list[Asked]], return_exceptions: bool = False
    ) -> Iterator[tuple[int, Any]]:
        with contextlib.closing(steps):
            for asked in itertools.chain.from_iterable(steps):
                result = asked.error or self.outcome(asked.completions)
                if isinstance(result, Exception) and not return_exceptions:
                    raise result
                yield asked.index, result

    def stream(
        self, prompt: Prompt, sampling_params: Params = None, objects: bool = False
    ) -> Iterator[str | Piece]:
        """
        The text of one completion, piece by piece while it is made. Pieces are whole characters; joined they
        are the "text" of `generate`. With `objects` each is a `Piece`: text, token_ids, logprobs where asked
        for, and in the last one the finish_reason. Closing the iterator drops the request.
        """
        self._take_turn()
        request = self.prompts.read(prompt, self.or_recommended(sampling_params))
        self.prompts.check_streamable(request.params, objects)
        self.prompts.warn_of_context([request])
        return self._pieces(Asked(request), objects)

    def _pieces(self, asked: Asked, objects: bool) -> Iterator[str | Piece]:
        take_delta = None
        with contextlib.closing(self._run([asked])) as steps:
            for _ in steps:
                take_delta = take_delta or self.growing(asked.completions[0], objects)
                if piece := take_delta():
                    yield piece

    def growing(self, seq: Sequence, objects: bool) -> Callable[[], str | Piece | None]:
        """What takes the deltas of a completion that is being made: its text, or `Piece` objects."""
        text = GrowingText(self.tokenizer, seq)
        return text.take_piece if objects else text.take_delta

    def outcome(self, completions: list[Sequence]) -> Result | Exception:
        """The result of a prompt from its completions, which have all ended, or an error about one."""
        try:
            return completions[0].request.own.get("error") or make_result(self.tokenizer, completions)
        except Exception as error:  # a decoder's
            return error

    def score(
        self,
        prompts: Prompts,
        use_tqdm: UseBar = True,
        from_token: int | list[int] = 1,
    ) -> list[dict[str, Any]]:
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
        make_bar = _bar_maker(use_tqdm)
        scored = self.prompts.read_scored(prompts, from_token)
        computed = [Asked(request) for _, request in scored if request.own["scores"].is_open]
        for _ in self._run(computed, total=len(computed), make_bar=make_bar):
            pass
        return list(itertools.starmap(self.make_score, scored))

    make_score = staticmethod(make_score)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: ParamsOfAll = None,
        use_tqdm: UseBar = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template_content_format: str = "auto",
    ) -> list[Result]:
        """
        `generate` for one conversation or a list of them, through the checkpoint's chat template or the one
        given. The answer is a new message; with continue_final_message=True and add_generation_prompt=False
        it continues the last one. Other variables of the template (such as enable_thinking) go into
        chat_template_kwargs.

        A content is a string or a list of parts {"type": "text", "text": ...}. The template gets what it is
        found to take, unless chat_template_content_format says "string" (parts are joined by line feeds) or
        "openai" (all are lists of parts).
        """
        chats = self.prompts.render_chats(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            chat_template_content_format=chat_template_content_format,
        )
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
        check_bool(skip_special_tokens, "skip_special_tokens")
        vocab_size = max(self.prompts.vocab_size, len(self.tokenizer))  # either may have more
        token_ids = as_token_ids(token_ids, vocab_size, "token_ids")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def add_request(self, prompt: Prompt, sampling_params: Params = None) -> int:
        """`LLMEngine.add_request`; a prompt may be a dict as for `generate`."""
        request = self.prompts.read(prompt, self.or_recommended(sampling_params))
        if request.params.n > 1:
            raise ValueError(f"add_request makes one completion of a prompt, got n={request.params.n}")
        self.prompts.warn_of_context([request])
        [seq] = self.queue(request)
        return seq.seq_id

    def queue(self, request: Request, call: dict[int, Asked] | None = None) -> list[Sequence]:
        """Queue all completions of a prompt, or none."""
        self._take_turn(call)
        completions = [request] * request.params.n
        if (seed := request.seed) is not None:
            completions = [replace(request, seed=(seed + i) % 2**63) for i in range(len(completions))]
        return self.add(completions)

    def _run(
        self,
        coming: Iterable[Asked],
        max_unfinished: int | None = None,
        isolate: bool = False,
        total: int | None = None,
        make_bar: MakeBar = no_bar,
    ) -> Iterator[list[Asked]]:
        """
        Queue requests while there is room, and step, until all have ended. Yields the requests that a step
        has ended, after each step, and a request that could not be read, at once. A progress
        bar counts the completions up to `total`, if something makes it.
        """
        queued: dict[int, Asked] = {}  # by the seq_id of each completion that has not ended
        coming, limit = iter(coming), max_unfinished or 2 * self.config.max_num_seqs
        step = self.step_or_isolate if isolate else super().step
        self._take_turn(queued)
        try:
            with contextlib.closing(make_bar(total=total, **LOOK)) as bar:
                progress = Progress(bar, self)
                while True:
                    ended = self._queue_some(coming, limit, queued)
                    if not ended:
                        if not queued or self.is_finished():
                            return
                        self._take_turn(queued)
                        finished, num_tokens = step()
                        progress.show(finished, num_tokens)
                        found = dict.fromkeys(queued.pop(i) for i, _ in finished if i in queued)
                        ended = [each for each in found if all(seq.is_finished for seq in each.completions)]
                    yield ended
        except BaseException:
            # An iterator may be closed when another call uses the engine, and when Python ends.
            if self._call is queued and not self._is_python_ending():
                self.clear()
            raise

    def _queue_some(self, coming: Iterator[Asked], limit: int, queued: dict[int, Asked]) -> list[Asked]:
        """Queue requests until `limit` completions are queued, or up to one that could not be read."""
        while len(queued) < limit and (asked := next(coming, None)) is not None:
            if asked.error is not None:
                return [asked]
            asked.completions = self.queue(asked.request, queued)
            queued.update((seq.seq_id, asked) for seq in asked.completions)
        return []
