"""The loop: queues requests and runs steps until they have ended.

Follow `step` -> `Scheduler.schedule` -> `ModelRunner.run` -> `Scheduler.postprocess`.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.config import Config
from nanovllm.distributed.ranks import SHUT_DOWN, EngineDeadError, Ranks
from nanovllm.engine.batch import Batch, BatchMaker, StepOutput
from nanovllm.engine.interfaces import SequenceError, resolve, selected
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import stats_of
from nanovllm.extensions.safety import recovery
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, Prompts, Request
from nanovllm.text.results import GrowingText, watch_stops
from nanovllm.utils.validation import check, is_number


@dataclass(eq=False)
class Step:
    """A step under way. Its `output` is None while its sampling waits for the host, see `_sample`."""

    sequences: list[Sequence]
    drawing: list[Sequence]
    num_tokens: int
    batch: Batch
    output: StepOutput | None


class LLMEngine:
    """
    `LLMEngine(model, **options)`: options are the fields of `Config`.

    After any exception inside `step` the requests are what they were before, and the next step goes on with
    them. `unfinished` has the sequences that have not ended, by id, for reading.
    """

    model_runner: ModelRunner | None = None
    ranks: Ranks | None = None
    assembly: str  # names the function that chooses the parts, as "package.module:name"
    open_model: Callable[[str, dict[str, Any]], tuple[Config, Checkpoint]]  # from the arguments of an engine
    # When Python itself ends, modules (and this one's names) may be gone before the engine. Nothing is freed
    # then: the end of the process does that.
    _is_python_ending = staticmethod(sys.is_finalizing)

    def __init__(self, model: str, **options: Any):
        self.config, checkpoint = self.open_model(model, options)
        with ThreadPoolExecutor(1) as pool:  # importing a tokenizer takes long and needs no device
            tokenizer = pool.submit((checkpoint.tokenizer_source or checkpoint).tokenizer)
            self.model_runner = self._start_runner(checkpoint)
            try:
                self.tokenizer = tokenizer.result()
                vocab_size = self.config.hf_config.vocab_size  # token ids beyond it are never drawn
                eos = checkpoint.eos_token_ids(self.tokenizer)
                self.config = replace(
                    self.config,
                    eos=tuple(token_id for token_id in eos if token_id < vocab_size),
                    num_kvcache_blocks=self.model_runner.kv_cache.num_blocks,
                )
                self.generation_config = checkpoint.generation_config()
            except BaseException:
                self.exit()
                raise
        parts, processors = self.parts, self.parts.logits_processors
        self.scheduler = Scheduler(self.config, parts.prefix_cache, parts.admissions, processors)
        backend = self.model_runner.backend
        self.batches = BatchMaker(self.config, parts.prefix_cache, backend, processors)
        limits, recommended = self.scheduler.limits, self.generation_config
        self.prompts = Prompts(self.config, self.tokenizer, limits, processors, recommended)
        for processor in processors:
            processor.start(self.config, self.prompts)
        self._seeds = random.Random(self.config.seed)
        self._overlap = self.config.device != "cpu"
        self.under_way: Step | None = None
        self.unfinished: dict[int, Sequence] = {}
        self.ended: dict[int, Sequence] = {}  # have ended, but no step has returned them yet
        self.drawn: list[Sequence] = []  # whose next tokens the last step has recorded
        self.texts: dict[int, GrowingText] = {}  # of sequences with stop texts
        self.attempt: recovery.Attempt | None = None  # under way, or broken off
        self._counts = Counter()

    def _start_runner(self, checkpoint: Checkpoint) -> ModelRunner:
        """Rank 0's model runner; starts the other ranks, which make theirs at the same time."""
        parts = self.parts = resolve(self.assembly)(self.config)
        if self.config.tensor_parallel_size == 1:
            runner = ModelRunner(self.config, parts)
            runner.start(checkpoint)
            return runner
        self.ranks = parts.make_ranks(self.config, checkpoint, self.assembly, parts.make_collectives)
        runner = ModelRunner(self.config, parts, self.ranks.group, self.ranks)
        with self.ranks.starting():
            runner.start(checkpoint)
        return runner

    def exit(self) -> None:
        """Free the devices' memory and end the other ranks. May be called twice; the engine is dead then."""
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

    def add_request(self, prompt: Prompt | Request, sampling_params: SamplingParams | None = None) -> int:
        """
        Queue one request and return its id. Raises ValueError, changing nothing, if it cannot be served.

        prompt: a string, a list of token ids or a dict as for `LLM.generate`; or a `Request` that `prompts`
        has read with its parameters, all of whose completions are queued, or none. The id is the first one's.
        """
        self.check_usable()
        request = prompt
        if not isinstance(request, Request):
            request = self.prompts.read(prompt, sampling_params)
            if request.params.n > 1:
                raise ValueError(f"add_request makes one completion of a prompt, got n={request.params.n}")
            self.prompts.warn_of_context([request])
        completions = [self._make_sequence(request, index) for index in range(request.params.n)]
        for seq in completions[1:]:
            seq.leader = completions[0]
        texts = watch_stops(self.tokenizer, completions)
        with recovery.attempting(self):
            for seq in completions:
                self.scheduler.add(seq)
            self.texts.update(texts)
            self.unfinished.update({seq.seq_id: seq for seq in completions})
        request.completions = completions
        return completions[0].seq_id

    def _make_sequence(self, request: Request, index: int) -> Sequence:
        """The index-th completion of a prompt."""
        params = request.params
        seed = self._seeds.getrandbits(63) if params.seed is None else (params.seed + index) % 2**63
        seq = Sequence(request.token_ids, params, self.config.kvcache_block_size, seed)
        if request.packed is not None:
            seq.packed_prompt = request.packed
        seq.wanted, seq.own = request.wanted, request.own
        return seq

    def step(self, isolate: bool = False) -> tuple[list[tuple[int, list[int]]], int]:
        """
        Run one step. Returns the requests that finished as (id, completion token ids), and the number of
        prompt tokens computed, or minus the number of sequences decoded. On a GPU a step returns what the one
        before it computed (the first returns nothing), so that the device never waits for the host. Aborted
        requests are returned by the next step.

        With `isolate` a request that makes steps fail ends alone, and one of its completions has the `error`;
        only what no request is to blame for is raised.
        """
        try:
            return self._step()
        except Exception as error:
            if not isolate or isinstance(error, EngineDeadError):
                raise
            self.check_usable()  # with several ranks, a step that fails on one of them ends the engine
            recovery.end_culprit(self, error)
            return [], 0

    def _step(self) -> tuple[list[tuple[int, list[int]]], int]:
        self.check_usable()
        self.drawn = []
        start = time.perf_counter()
        with recovery.attempting(self, reports=True) as attempt:
            attempt.sequences, is_prefill = self.scheduler.schedule()
            step = self._launch(attempt.sequences, is_prefill, attempt) if attempt.sequences else None
            if self._overlap:  # collect the step before this one, while the device is busy with this one
                step, self.under_way = self.under_way, step
            num_tokens = self._collect(step, attempt) if step is not None else 0
            if not self.unfinished:
                self.scheduler.all_ended()
                if self.under_way is not None:  # drain the step launched before we knew that all had ended
                    self._collect(self.under_way, attempt)
                    self.under_way = None
            self._counts["seconds"] += time.perf_counter() - start
            return [(seq.seq_id, seq.completion_token_ids) for seq in self.ended.values()], num_tokens

    def _launch(self, sequences: list[Sequence], is_prefill: bool, attempt: recovery.Attempt) -> Step:
        num_tokens = sum(seq.num_scheduled_tokens for seq in sequences) if is_prefill else -len(sequences)
        batch = self.batches.prefill(sequences) if is_prefill else self.batches.decode(sequences)
        if self.under_way is not None:  # not earlier: from its sampling on the GPU waits for this step
            self._sample(self.under_way, attempt)
            attempt.sequences = sequences
        with self.model_runner.on_device():
            output = self.model_runner.call("run", batch)
            output = output and output.to_host(batch)
        return Step(sequences, self.scheduler.advance(sequences), num_tokens, batch, output)

    def _sample(self, step: Step, attempt: recovery.Attempt) -> None:
        """
        Finish a step whose sampling has waited for what logits processors make of all tokens before. On a GPU
        its forward pass runs meanwhile.
        """
        if step.output is not None:
            return
        attempt.sequences = step.sequences
        messages = {}
        try:
            for processor in selected(self.parts.logits_processors, step.batch.wanted):
                if processor.waits_for_host:
                    messages[processor.name] = processor.host_input(step.sequences)
        except SequenceError as error:
            attempt.sequences = [error.sequence]
            raise
        with self.model_runner.on_device():
            step.output = self.model_runner.call("sample", messages).to_host(step.batch)

    def _collect(self, step: Step, attempt: recovery.Attempt) -> int:
        self._sample(step, attempt)
        attempt.sequences = step.sequences
        token_ids = step.output.token_ids()
        self.check_usable()  # where a rank has failed the tokens are worthless
        attempt.lengths = [len(seq.token_ids) for seq in step.drawing]
        attempt.drawing = step.drawing
        for name, tensors in step.output.tensors.items():
            self.parts.logits_processor(name).record(step.sequences, step.drawing, tensors)
        finished = self.scheduler.postprocess(step.sequences, token_ids, step.drawing)
        if self.texts:
            finished += self._find_stops(step.drawing, attempt)
        for seq in finished:
            self._end(seq)
            self._counts.update(finished=1, prompt=seq.num_prompt_tokens, cached=seq.num_prompt_tokens_cached)
        self.drawn += step.drawing
        self._counts["drawn"] += len(step.drawing)
        return step.num_tokens

    def _find_stops(self, drawing: list[Sequence], attempt: recovery.Attempt) -> list[Sequence]:
        """
        Stop the sequences whose newest tokens complete a stop text. Returns those that these tokens had not
        finished already. A token that a step under way draws for a stopped one is thrown away.
        """
        stopped = []
        for seq in drawing:
            if (text := self.texts.get(seq.seq_id)) is not None:
                attempt.sequences = [seq]
                if (stop := text.find_stop()) is not None:
                    stopped += [] if seq.is_finished else [seq]
                    self.scheduler.end(seq, "stop", stop)
        return stopped

    def _end(self, seq: Sequence) -> None:
        self.ended[seq.seq_id] = seq
        del self.unfinished[seq.seq_id]
        self.texts.pop(seq.seq_id, None)
        for processor in selected(self.parts.logits_processors, seq.wanted):
            processor.ended(seq)

    def abort(self, request_id: int) -> None:
        """
        End a request and free its blocks at once. Its result has the tokens so far and the finish_reason
        "abort". If there is no such request, or it has finished, this does nothing.
        """
        self.check_usable()
        check(is_number(request_id, int), "request_id must be an integer", request_id)  # 1.0 would find 1
        with recovery.attempting(self):
            if (seq := self.unfinished.get(request_id)) is not None:
                self.scheduler.end(seq, "abort")
                self._end(seq)

    def stats(self) -> dict[str, float]:
        """What it has done since it was made, and how many tokens the KV cache has room for: see stats.py."""
        return stats_of(self, self._counts)

    def is_finished(self) -> bool:
        """Whether no request is left."""
        return not self.unfinished and not self.ended and self.under_way is None

    def clear(self) -> None:
        """Drop every request."""
        if self._is_python_ending():
            return
        self.unfinished, self.ended, self.attempt = {}, {}, recovery.Attempt()
        if self.ranks is not None and self.ranks.failure:
            self.exit()
        recovery.recover(self)

    def check_usable(self) -> None:
        """Raise EngineDeadError if the engine was shut down or has lost a rank."""
        if self.ranks is not None:
            self.ranks.check()
        if self.model_runner is None:
            raise EngineDeadError(SHUT_DOWN)
