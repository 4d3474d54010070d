"""What users call: turns prompts into sequences, runs steps until all are finished, and turns tokens into
text.

Follow `generate` -> `step` -> `Scheduler.schedule` -> `ModelRunner.launch` -> `Scheduler.postprocess`.
"""

import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from operator import itemgetter
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from nanovllm.checkpoints import open_checkpoint
from nanovllm.config import Config
from nanovllm.distributed.ranks import SHUT_DOWN, EngineDeadError, Ranks
from nanovllm.engine.isolation import Isolation, outcome
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_data import StepOutput
from nanovllm.sampling_params import SamplingParams, recommended_params
from nanovllm.text.prompts import Messages, Prompt, Prompts, as_token_ids, check_template_kwargs
from nanovllm.text.results import GrowingText, make_result, record_logprobs
from nanovllm.utils.validation import check_bool, shown


class Step(NamedTuple):
    """A step under way."""

    sequences: list[Sequence]
    drawing: list[Sequence]
    num_tokens: int
    output: StepOutput


class Attempt:
    """A change of the books that has begun, such as a step, and what is needed to undo it."""

    def __init__(self):
        self.sequences: list[Sequence] = []  # that are being computed or looked at, and may be to blame
        self.drawing: list[Sequence] = []  # whose next token is being recorded
        self.lengths: list[int] = []  # the number of tokens they had before


class LLMEngine:
    """
    `LLMEngine(model, **options)`: options are the fields of `Config`.

    After any exception inside `generate` the engine is empty and usable: no request left, all blocks free.
    After one inside `step` the requests are what they were before it, and the next step goes on with them.
    """

    model_runner: ModelRunner | None = None
    ranks: Ranks | None = None
    # While Python itself ends, modules may be gone before the engine, this one's names too. Nothing is tidied
    # up then: the end of the process does that.
    _is_python_ending = staticmethod(sys.is_finalizing)

    def __init__(self, model: str, **options: Any):
        self.config = Config.from_options(model, options)
        checkpoint = open_checkpoint(self.config.model, self.config.load_format)
        self.config.model = checkpoint.path
        self.config.fill_in(checkpoint.hf_config())
        with ThreadPoolExecutor(1) as pool:  # a tokenizer takes long to import and needs no device
            tokenizer = pool.submit(checkpoint.tokenizer)
            self.model_runner = self._start_runner()
            try:
                self.tokenizer = tokenizer.result()
                vocab_size = self.config.hf_config.vocab_size  # what lies beyond is never drawn, nor banned
                eos = checkpoint.eos_token_ids(self.tokenizer)
                self.config.eos = tuple(token_id for token_id in eos if token_id < vocab_size)
                self._generation_config = checkpoint.generation_config()
            except BaseException:
                self.exit()
                raise
        self.scheduler = Scheduler(self.config)
        self.prompts = Prompts(self.config, self.tokenizer, self.scheduler)
        self._seeds = random.Random(self.config.seed)
        self._overlap = self.config.device != "cpu"
        self._under_way: Step | None = None
        self._requests: dict[int, Sequence] = {}  # those that are not finished, by seq_id
        self._ended: dict[int, Sequence] = {}  # those that are, but that no step has reported yet
        self._texts: dict[int, GrowingText] = {}  # of those with stop texts
        self._attempt: Attempt | None = None  # the last one, until it has come to its end
        self._owner: object = None  # the call that the unfinished requests are of; None is add_request
        self._counts = Counter()

    def _start_runner(self) -> ModelRunner:
        """This process's model runner, which has the other ranks' with it."""
        if self.config.tensor_parallel_size == 1:
            return ModelRunner(self.config)
        self.ranks = Ranks(self.config)
        try:
            return ModelRunner(self.config, 0, self.ranks.group, self.ranks)
        except BaseException as error:
            try:
                if isinstance(error, RuntimeError):
                    self.ranks.explain(error)
                raise
            finally:
                self.ranks.group.abort()
                self.ranks.close(at_once=True)
                self.ranks.group.close()

    def exit(self) -> None:
        """
        Free the devices' memory and end the other ranks. May be called twice; the engine cannot be used
        afterwards.
        """
        runner, self.model_runner = self.model_runner, None
        if runner is not None:
            if self.ranks is not None:
                self.ranks.finish_step()
            runner.exit()
        if self.ranks is not None:
            self.ranks.close()
            self.ranks.group.close()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.exit()

    def __del__(self) -> None:
        if not self._is_python_ending():
            self.exit()

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """
        Queue one request and return its id. Raises ValueError, changing nothing, if it cannot be served.
        """
        self._own()
        token_ids = self.prompts.read(prompt, sampling_params)
        if sampling_params.n > 1:
            raise ValueError(f"add_request makes one completion of a prompt, got n={sampling_params.n}")
        self.prompts.warn_of_context([(token_ids, sampling_params)])
        return self._enqueue(self._make_sequence(token_ids, sampling_params)).seq_id

    def _enqueue_all(self, token_ids: list[int], params: SamplingParams) -> list[Sequence]:
        """Queue all completions of a prompt."""
        sequences = [self._make_sequence(token_ids, params, index) for index in range(params.n)]
        for seq in sequences[1:]:
            seq.leader = sequences[0]
        self._enqueue(*sequences)
        return sequences

    def _make_sequence(self, token_ids: list[int], params: SamplingParams, index: int = 0) -> Sequence:
        """The index-th completion of a prompt."""
        seed = self._seeds.getrandbits(63) if params.seed is None else (params.seed + index) % 2**63
        seq = Sequence(token_ids, params, self.config.kvcache_block_size, seed)
        seq.bad_words = self.prompts.bad_words(params)
        if params.prompt_logprobs is not None and index == 0:
            seq.scored_token_ids = token_ids[1:]
        return seq

    def _enqueue(self, *sequences: Sequence) -> Sequence:
        """Queue all of them, or none. Returns the first."""
        with_stops = [seq for seq in sequences if seq.sampling_params.stop]
        texts = {seq.seq_id: GrowingText(self.tokenizer, seq) for seq in with_stops}
        with self._attempting():
            for seq in sequences:
                self.scheduler.add(seq)
            self._texts.update(texts)
            self._requests.update({seq.seq_id: seq for seq in sequences})
        return sequences[0]

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """
        Run one step. Returns the requests that finished as (id, completion token ids), and the number of
        prompt tokens computed, or minus the number of sequences decoded. On a GPU a step returns what the one
        before it computed (the first returns nothing), so that the device never waits for the host. Aborted
        requests are returned by the next step.
        """
        self._own()
        return self._step()

    def _step(self) -> tuple[list[tuple[int, list[int]]], int]:
        self._check_usable()
        start = time.perf_counter()
        with self._attempting(reports=True) as attempt:
            attempt.sequences, is_prefill = self.scheduler.schedule()
            step = self._launch(attempt.sequences, is_prefill) if attempt.sequences else None
            if self._overlap:  # the host's work on this step is done while the device is busy with it
                step, self._under_way = self._under_way, step
            num_tokens = self._collect(step, attempt) if step is not None else 0
            self._counts["seconds"] += time.perf_counter() - start
            return [(seq.seq_id, seq.completion_token_ids) for seq in self._ended.values()], num_tokens

    @contextlib.contextmanager
    def _attempting(self, reports: bool = False) -> Iterator[Attempt]:
        """
        Change the books, at the end of which all that have ended may have been reported. Where this is broken
        off, at whatever line, the next attempt undoes it first.
        """
        self._recover()
        self._attempt = Attempt()
        yield self._attempt
        self._ended, self._attempt = {} if reports else self._ended, None

    def _recover(self) -> None:
        """
        Undo an attempt that was broken off, if the last one was. What it has computed, and where, is unknown:
        so nothing is kept that the cache holds, and all requests that had not ended before are queued again
        with the tokens they had.
        """
        if self._attempt is None:
            return
        self._under_way = None
        if self.model_runner is not None:  # not shut down in the middle of its work
            try:
                self.model_runner.call("reset")
            except Exception as error:
                raise EngineDeadError(f"the engine cannot go on after a step that failed: {error}") from error
        for seq_id in self._ended:
            self._requests.pop(seq_id, None)
        for seq, length in zip(self._attempt.drawing, self._attempt.lengths, strict=False):
            if seq.seq_id in self._requests:
                del seq.token_ids[length:]
        self.scheduler.restart(self._requests.values())
        self._texts = {}
        for seq in self._requests.values():
            if seq.sampling_params.stop:
                text = self._texts[seq.seq_id] = GrowingText(self.tokenizer, seq)
                with contextlib.suppress(Exception):  # comes again where the text is looked at next
                    text.look()
        self._attempt = None

    def _launch(self, sequences: list[Sequence], is_prefill: bool) -> Step:
        num_tokens = sum(seq.num_scheduled_tokens for seq in sequences) if is_prefill else -len(sequences)
        output = self.model_runner.launch(sequences, is_prefill)
        return Step(sequences, self.scheduler.advance(sequences), num_tokens, output)

    def _collect(self, step: Step, attempt: Attempt) -> int:
        attempt.sequences = step.sequences
        token_ids = step.output.token_ids()
        self._check_usable()  # where a rank has failed the tokens are worthless
        attempt.lengths = [len(seq.token_ids) for seq in step.drawing]
        attempt.drawing = step.drawing
        record_logprobs(step.sequences, step.drawing, step.output)
        finished = self.scheduler.postprocess(step.sequences, token_ids, step.drawing)
        if self._texts:
            finished = self._check_stop_texts(step.drawing, finished, attempt)
        for seq in finished:
            self._ended[seq.seq_id] = self._requests[seq.seq_id]
            del self._requests[seq.seq_id]
            self._counts["finished"] += 1
            self._counts["prompt"] += seq.num_prompt_tokens
            self._counts["cached"] += seq.num_prompt_tokens_cached
        self._counts["drawn"] += len(step.drawing)
        return step.num_tokens

    def _check_stop_texts(
        self, drawing: list[Sequence], finished: list[Sequence], attempt: Attempt
    ) -> list[Sequence]:
        """
        End the sequences whose newest tokens complete a stop text, and return all that have finished. Where
        steps overlap, the token that such a sequence draws meanwhile is never looked at.
        """
        for seq in drawing:
            text = self._texts.get(seq.seq_id)
            if text is None:
                continue
            attempt.sequences = [seq]
            if (stop := text.find_stop()) is not None:
                if not seq.is_finished:
                    finished.append(seq)
                self.scheduler.stop(seq, stop)
        for seq in finished:
            self._texts.pop(seq.seq_id, None)
        return finished

    def abort(self, request_id: int) -> None:
        """
        End a request and free its blocks at once. Its result has what there is so far and the finish_reason
        "abort". That it has finished already, or never was, is no error.
        """
        self._check_usable()
        if isinstance(request_id, bool) or not isinstance(request_id, Integral):  # 1.0 would find 1
            raise ValueError(f"request_id must be an integer, got {shown(request_id)}")
        with self._attempting():
            seq = self._requests.get(request_id)
            if seq is not None:
                self.scheduler.abort(seq)
                self._texts.pop(request_id, None)
                self._ended[request_id] = seq
                del self._requests[request_id]

    def stats(self) -> dict[str, float]:
        """
        Counts since the engine was made: requests (finished, running and waiting now), prompt tokens of the
        finished ones and how many of these the KV cache had, tokens drawn, preemptions, and tokens drawn per
        second of computing.
        """
        counts, scheduler = self._counts, self.scheduler
        num_generated = counts["drawn"] - scheduler.num_surplus_tokens
        return {
            "num_requests_finished": counts["finished"],
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_prompt_tokens": counts["prompt"],
            "num_cached_tokens": counts["cached"],
            "cache_hit_rate": counts["cached"] / max(counts["prompt"], 1),
            "num_generated_tokens": num_generated,
            "num_preemptions": scheduler.num_preemptions,
            "tokens_per_second": num_generated / counts["seconds"] if counts["seconds"] else 0.0,
        }

    def is_finished(self) -> bool:
        """Whether no request is left."""
        return not self._requests and not self._ended and self._under_way is None

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] = SamplingParams(),
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """
        Complete the prompts; results are in their order.

        prompts: a string, a list of token ids or a dict with one of these as "prompt" or "prompt_token_ids",
        or a list of such. sampling_params: one for all, or one each. Raises ValueError naming the prompt or
        parameter at fault, before anything is computed. Warns of a max_tokens beyond the context, where a
        completion ends.

        Every result has
          text, token_ids    the completion; token_ids include what ended it
          finish_reason      "stop" (an end-of-sequence token, a stop text or token), "length" or "abort"
          stop_reason        the stop text or stop token id that ended it, else None
          num_prompt_tokens, num_cached_tokens   of the prompt, and how many of these the KV cache had
          outputs            with n > 1 all completions, of which the first also stands above
        and where parameters ask for them
          logprobs           of each token of the completion a dict {token id: Logprob}: of that token and the
                             likeliest ones, each with logprob, rank (1 is the likeliest) and decoded_token
          prompt_logprobs    the same for the prompt, whose first token has None
        """
        found = sorted(self.generate_iter(prompts, sampling_params, use_tqdm), key=itemgetter(0))
        return [result for _, result in found]

    def generate_iter(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] = SamplingParams(),
        use_tqdm: bool = False,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """
        `generate` that yields (index of the prompt, result) as soon as a prompt is done. Nothing is computed
        between two results, and closing the iterator drops what is left. Until the last result other calls
        are a RuntimeError.
        """
        self._check_idle()
        check_bool(use_tqdm, "use_tqdm")
        return self._generate(self.prompts.read_all(prompts, sampling_params), use_tqdm)

    def _generate(
        self, requests: list[tuple[list[int], SamplingParams]], use_tqdm: bool
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        owner = self._begin()
        try:
            groups = [self._enqueue_all(*request) for request in requests]
            index = {seq.seq_id: i for i, group in enumerate(groups) for seq in group}
            num_left = list(map(len, groups))
            for seq_id in self._run_to_end(len(index), use_tqdm):
                i = index[seq_id]
                num_left[i] -= 1
                if not num_left[i]:
                    yield i, make_result(self.tokenizer, groups[i])
        except BaseException:
            self._drop(owner)
            raise

    def generate_from(
        self,
        requests: Iterable[tuple[Prompt, SamplingParams]],
        max_unfinished: int | None = None,
        return_exceptions: bool = False,
    ) -> Iterator[tuple[int, dict[str, Any] | Exception]]:
        """
        `generate_iter` for any number of requests in bounded memory: the next is taken from `requests` only
        while fewer than `max_unfinished` completions (default: twice max_num_seqs) are queued or running. A
        bad request is a ValueError when its turn comes. With `return_exceptions` a request that is bad, or
        fails for reasons of its own such as its size, yields (index, exception) and the others go on.
        """
        owner = self._begin()
        limit = 2 * self.config.max_num_seqs if max_unfinished is None else max_unfinished
        if isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 1:
            raise ValueError(f"max_unfinished must be an integer of at least 1, got {shown(limit)}")
        check_bool(return_exceptions, "return_exceptions")
        step, result_of = self._step, make_result
        if return_exceptions:
            step, result_of = Isolation(self).step, outcome
        coming, groups = enumerate(requests), {}  # the second by seq_id: (index, all completions)
        has_warned = False
        try:
            while True:
                self._own(owner)
                refused = None
                while len(self._requests) < limit and (numbered := next(coming, None)) is not None:
                    i, request = numbered
                    try:
                        token_ids, params = self._read_request(i, request)
                        which = f"prompts[{i}], and maybe later ones"
                        has_warned = has_warned or self.prompts.warn_of_context([(token_ids, params)], which)
                        group = self._enqueue_all(token_ids, params)
                    except ValueError as error:
                        if not return_exceptions:
                            raise
                        refused = i, error
                        break
                    groups.update({seq.seq_id: (i, group) for seq in group})
                if refused is not None:
                    yield refused
                    continue
                if not groups and self.is_finished():
                    self._owner = None
                    return
                for seq_id, _ in step()[0]:
                    i, group = groups.pop(seq_id)
                    if not any(seq.seq_id in groups for seq in group):
                        yield i, result_of(self.tokenizer, group)
        except BaseException:
            self._drop(owner)
            raise

    def _read_request(self, i: int, request: Any) -> tuple[list[int], SamplingParams]:
        if not isinstance(request, tuple) or len(request) != 2:
            raise ValueError(f"requests[{i}] must be (prompt, SamplingParams), got {shown(request)}")
        prompt, params = request
        return self.prompts.read(prompt, params, f"prompts[{i}]"), params

    def stream(self, prompt: Prompt, sampling_params: SamplingParams = SamplingParams()) -> Iterator[str]:
        """
        The text of one completion, piece by piece while it is made: whole characters that join to the "text"
        of `generate`. Closing the iterator drops the request.
        """
        self._check_idle()
        token_ids = self.prompts.read(prompt, sampling_params)
        self.prompts.check_streamable(sampling_params)
        self.prompts.warn_of_context([(token_ids, sampling_params)])
        return self._stream(token_ids, sampling_params)

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[str]:
        owner = self._begin()
        try:
            text = GrowingText(self.tokenizer, self._enqueue(self._make_sequence(token_ids, params)))
            while not text.seq.is_finished:
                self._step()
                if text.seq.is_finished:
                    self._finish_steps()
                if piece := text.look():
                    yield piece
        except BaseException:
            self._drop(owner)
            raise

    def score(self, prompts: Prompt | list[Prompt], use_tqdm: bool = True) -> list[dict[str, Any]]:
        """
        How likely the model finds texts (or token ids, or dicts as for `generate`). Every result has
          token_ids        of the text
          token_logprobs   natural logarithm of each token's probability after those before it; None for the
                           first
          logprob          their sum, the log-likelihood of the text
        """
        check_bool(use_tqdm, "use_tqdm")
        texts = self.prompts.read_texts(prompts)
        self._begin()
        try:
            scored = [self._enqueue_scoring(token_ids) for token_ids in texts]
            for _ in self._run_to_end(sum(seq is not None for seq in scored), use_tqdm):
                pass
        except BaseException:
            self._clear()
            raise
        logprobs = [[logprob for logprob, *_ in seq.prompt_logprobs] if seq else [] for seq in scored]
        return [
            {"token_ids": ids, "token_logprobs": [None, *found], "logprob": sum(found)}
            for ids, found in zip(texts, logprobs, strict=True)
        ]

    def _enqueue_scoring(self, token_ids: list[int]) -> Sequence | None:
        """Queue what scores all tokens but the first; a single token leaves nothing to score."""
        if len(token_ids) == 1:
            return None
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        seq = self._make_sequence(token_ids[:-1], params)
        seq.scored_token_ids = token_ids[1:]
        return self._enqueue(seq)

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends. Raises ValueError for a bad value."""
        try:
            return recommended_params(self._generation_config)
        except ValueError as error:
            raise ValueError(f"generation_config.json of {self.config.model!r}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, as a prompt of it would have them."""
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {shown(text)}")
        return self.prompts.tokenize(text, "text")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model!r} has no tokenizer")
        if not isinstance(token_ids, (list, tuple)):
            raise ValueError(f"token_ids must be a list of token ids, got {shown(token_ids)}")
        check_bool(skip_special_tokens, "skip_special_tokens")
        vocab_size = max(self.prompts.vocab_size, len(self.tokenizer))  # either may have more
        token_ids = as_token_ids(token_ids, vocab_size, "token_ids")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def chat(
        self,
        messages: Messages | list[Messages],
        sampling_params: SamplingParams | list[SamplingParams] = SamplingParams(),
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """
        `generate` for one conversation or a list of them, through the checkpoint's chat template or the one
        given. The answer is a new message, or with continue_final_message=True and
        add_generation_prompt=False more of the last one. What else the template understands (such as
        enable_thinking) goes into chat_template_kwargs.
        """
        self._check_usable()
        token_ids = self.prompts.read_chats(
            messages,
            chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **check_template_kwargs(chat_template_kwargs),
        )
        return self.generate(token_ids, sampling_params, use_tqdm)

    def _clear(self) -> None:
        """Drop every request."""
        self._owner, self._requests, self._ended, self._attempt = None, {}, {}, Attempt()
        if self.ranks is not None and self.ranks.failure:
            self.exit()
        self._recover()

    def _run_to_end(self, num_requests: int, use_tqdm: bool) -> Iterator[int]:
        """Step until they all are finished, yielding their ids as they are; shows progress and speed."""
        speed = {"Prefill": "-", "Decode": "-"}
        with tqdm(total=num_requests, desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as bar:
            seconds = 0.0
            while num_requests:
                start = time.perf_counter()
                finished, num_tokens = self._step()
                seconds += time.perf_counter() - start
                if num_tokens:  # else it has only launched a step, for the next call to collect
                    phase = "Prefill" if num_tokens > 0 else "Decode"
                    speed[phase] = f"{abs(num_tokens) / seconds:.0f}tok/s"
                    seconds = 0.0
                bar.set_postfix(speed, refresh=False)
                bar.update(len(finished))
                num_requests -= len(finished)
                if not num_requests:
                    self._finish_steps()
                yield from (seq_id for seq_id, _ in finished)

    def _finish_steps(self) -> None:
        """Collect what is under way when no request is left: a step that came too late to know."""
        while not self.is_finished():
            self._step()
        self._owner = None

    def _check_idle(self) -> None:
        self._check_usable()
        if self._requests:
            raise RuntimeError("this needs an idle engine, but there are requests that are not finished")
        self._finish_steps()

    def _begin(self) -> object:
        """For a call that has the engine to itself. Returns the owner of its requests."""
        self._check_idle()
        self._owner = object()
        return self._owner

    def _own(self, owner: object = None) -> None:
        """The requests to come are this owner's. Raises RuntimeError if there are another's, unfinished."""
        self._check_usable()
        if self._requests and self._owner is not owner:
            raise RuntimeError("the engine is busy with the unfinished requests of another call")
        self._owner = owner

    def _drop(self, owner: object) -> None:
        """Drop every request, unless the engine has gone over to another call (an iterator may live on)."""
        if self._owner is owner and not self._is_python_ending():
            self._clear()

    def _check_usable(self) -> None:
        if self.ranks is not None:
            self.ranks.check()
        if self.model_runner is None:
            raise EngineDeadError(SHUT_DOWN)
