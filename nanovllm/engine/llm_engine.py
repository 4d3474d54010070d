"""The loop: queues requests, runs steps, and undoes a step that did not run to its end.

Follow `step` -> `Scheduler.schedule` -> `ModelRunner.run` -> `Scheduler.postprocess`.
"""

import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

from nanovllm.checkpoints import Checkpoint, open_checkpoint
from nanovllm.config import Config
from nanovllm.distributed.ranks import SHUT_DOWN, EngineDeadError, Ranks
from nanovllm.engine.batch import BatchMaker, StepOutput
from nanovllm.engine.edits import num_rule_words
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, Prompts
from nanovllm.text.results import GrowingText, record_logprobs
from nanovllm.utils.validation import shown


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

    After any exception inside `step` the requests are what they were before, and the next step goes on with
    them.
    """

    model_runner: ModelRunner | None = None
    ranks: Ranks | None = None
    # While Python itself ends, modules may be gone before the engine, this one's names too. Nothing is tidied
    # up then: the end of the process does that.
    _is_python_ending = staticmethod(sys.is_finalizing)

    def __init__(self, model: str, **options: Any):
        config = Config.from_options(model, options)
        checkpoint = open_checkpoint(config.model, config.load_format)
        self.config = config.with_checkpoint(checkpoint)
        with ThreadPoolExecutor(1) as pool:  # a tokenizer takes long to import and needs no device
            tokenizer = pool.submit(checkpoint.tokenizer)
            self.model_runner = self._start_runner(checkpoint)
            try:
                self.tokenizer = tokenizer.result()
                vocab_size = self.config.hf_config.vocab_size  # what lies beyond is never drawn, nor banned
                eos = checkpoint.eos_token_ids(self.tokenizer)
                self.config = replace(
                    self.config,
                    eos=tuple(token_id for token_id in eos if token_id < vocab_size),
                    num_kvcache_blocks=self.model_runner.kv_cache.num_blocks,
                )
                self._generation_config = checkpoint.generation_config()
            except BaseException:
                self.exit()
                raise
        self.scheduler = Scheduler(self.config)
        self.batches = BatchMaker(self.config)
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

    def _start_runner(self, checkpoint: Checkpoint) -> ModelRunner:
        """This process's model runner, which has the other ranks' with it."""
        if self.config.tensor_parallel_size == 1:
            return ModelRunner(self.config, checkpoint)
        self.ranks = Ranks(self.config, checkpoint)
        try:
            return ModelRunner(self.config, checkpoint, 0, self.ranks.group, self.ranks)
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
        ends = self.scheduler.end_token_ids(params)
        seq.num_rule_words = num_rule_words(params, seq.bad_words, ends)
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
                self.batches.reset()
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
        batch = self.batches.prefill(sequences) if is_prefill else self.batches.decode(sequences)
        with self.model_runner.on_device():
            output = self.model_runner.call("run", batch).to_host(batch)
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

    def clear(self) -> None:
        """Drop every request."""
        self._owner, self._requests, self._ended, self._attempt = None, {}, {}, Attempt()
        if self.ranks is not None and self.ranks.failure:
            self.exit()
        self._recover()

    def _own(self, owner: object = None) -> None:
        """The requests to come are this owner's. Raises RuntimeError if there are another's, unfinished."""
        self._check_usable()
        if self._requests and self._owner is not owner:
            raise RuntimeError("the engine is busy with the unfinished requests of another call")
        self._owner = owner

    def _check_usable(self) -> None:
        if self.ranks is not None:
            self.ranks.check()
        if self.model_runner is None:
            raise EngineDeadError(SHUT_DOWN)
