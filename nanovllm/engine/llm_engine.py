"""The loop: queues requests and runs steps until they have ended.

Follow `step` -> `Scheduler.schedule` -> `ModelRunner.run` -> `Scheduler.postprocess`.
"""

import random
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nanovllm.checkpoints.folder import Checkpoint, FolderCheckpoint
from nanovllm.config import Config
from nanovllm.distributed.ranks import SHUT_DOWN, EngineDeadError, Ranks
from nanovllm.engine.batch import Batch, BatchMaker, StepOutput
from nanovllm.engine.input_processor import InputProcessor, Prompt
from nanovllm.engine.interfaces import Parts, notify
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.layers.sampler import selected
from nanovllm.sampling_params import SamplingParams


@dataclass(eq=False)
class Step:
    """A step in flight, or another change of the engine's requests. Filled in as far as it has come."""

    sequences: list[Sequence]
    started: float = 0.0  # when the call began that scheduled it, of time.perf_counter
    num_tokens: int = 0  # that it computes of prompts; or minus the number of sequences that it decodes
    batch: Batch | None = None
    output: StepOutput | None = None  # None while its sampling waits for the host, see `_sample`
    drawing: dict[Sequence, int] = field(default_factory=dict)  # whose next token it draws, and its position


class LLMEngine:
    """
    `LLMEngine(model, **options)`: options are the fields of `Config`. `unfinished` has the sequences that
    have not ended, by id, for reading.

    A call that was broken off, by an error or by Ctrl-C, leaves its Step in `attempt`. The next one finds it
    there, drops all requests (unless an observer keeps them) and begins with an empty cache.
    """

    model_runner: ModelRunner | None = None
    ranks: Ranks | None = None
    assembly: Callable[[Config], Parts]  # chooses the parts; the other ranks import it
    make_prompts = InputProcessor
    # When Python itself ends, modules (and this one's names) may be gone before the engine. Nothing is freed
    # then: the end of the process does that.
    _is_python_ending = staticmethod(sys.is_finalizing)

    def __init__(self, model: str, **options: Any):
        self.config, checkpoint = self.open_model(model, options)
        with ThreadPoolExecutor(1) as pool:  # importing a tokenizer takes long and needs no device
            tokenizer = pool.submit(checkpoint.tokenizer)
            try:
                self.start_runner(checkpoint)
                self.tokenizer = tokenizer.result()
                vocab_size = self.config.hf_config.vocab_size  # token ids beyond it are never drawn
                eos = checkpoint.eos_token_ids(self.tokenizer)
                self.config = replace(
                    self.config,
                    eos=tuple(token_id for token_id in eos if token_id < vocab_size),
                    num_kvcache_blocks=self.model_runner.kv_cache.num_blocks,
                )
            except BaseException:
                self.exit()
                raise
        parts, processors = self.parts, self.parts.logits_processors
        self.notify = partial(notify, parts.observers)
        self.tell = partial(notify, [observer for observer in parts.observers if observer.watches])
        self.scheduler = Scheduler(self.config, parts.prefix_cache, parts.admissions, parts.policy, self.tell)
        self.batches = BatchMaker(self.config, parts, self.model_runner.backend)
        self.prompts = self.make_prompts(self.config, self.tokenizer, processors)
        for processor in processors:
            processor.start(self.config, self.prompts)
        self._seeds = random.Random(self.config.seed)
        self._overlap = self.config.device != "cpu"
        self.seconds = 0.0  # that all steps have taken
        self.in_flight: list[Step] = []  # launched and not collected yet
        self.unfinished: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []  # no step has returned them yet
        self.attempt: Step | None = None  # what is being done, or was broken off
        self.notify("started", weakref.proxy(self))

    @staticmethod
    def open_model(model: str, options: dict[str, Any]) -> tuple[Config, Checkpoint]:
        """What the arguments of an engine say, completed by the folder that they name; and that, opened."""
        config = Config(model, **options)
        checkpoint = FolderCheckpoint(config.model)
        return config.with_checkpoint(checkpoint), checkpoint

    def start_runner(self, checkpoint: Checkpoint) -> None:
        """Make rank 0's model runner; and start the other ranks, which make theirs at the same time."""
        parts = self.parts = self.assembly(self.config)
        if self.config.tensor_parallel_size == 1:
            runner = ModelRunner(self.config, parts)
            runner.start(checkpoint)
        else:
            self.ranks = parts.make_ranks(self.config.tensor_parallel_size, parts.make_collectives)
            runner = ModelRunner(self.config, parts, self.ranks.group, self.ranks)
            self.ranks.start(runner, checkpoint, self.assembly)
        self.model_runner = runner

    def exit(self) -> None:
        """Free the devices' memory and end the other ranks. May be called twice; the engine is dead then."""
        runner, self.model_runner = self.model_runner, None
        if self.ranks is not None:
            self.ranks.close()
        elif runner is not None:
            runner.exit()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.exit()

    def __del__(self) -> None:
        if not self._is_python_ending():
            self.exit()

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams = SamplingParams()) -> int:
        """
        Queue one request and return its id. Raises ValueError, changing nothing, if it cannot be served.

        prompt: a string or a list of token ids.
        """
        [seq] = self.add(self.prompts.read_all([prompt], sampling_params))
        return seq.seq_id

    def add(self, requests: Iterable[Request]) -> list[Sequence]:
        """Queue all of them, or none. A request without a seed gets one."""
        self.begin()
        sequences = []
        for request in requests:
            if request.seed is None:
                request = replace(request, seed=self._seeds.getrandbits(63))
            sequences.append(Sequence(request))
            self.scheduler.add(sequences[-1])
        self.notify("added", sequences)
        self.unfinished |= {seq.seq_id: seq for seq in sequences}
        self.attempt = None
        return sequences

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """
        Run one step. Returns the requests that finished as (id, completion token ids), and the number of
        prompt tokens computed, or minus the number of sequences decoded. On a GPU a step returns what the one
        before it computed (the first returns nothing), so that the device never waits for the host. Aborted
        requests are returned by the next step.
        """
        start = time.perf_counter()
        self.begin()
        sequences, is_prefill = self.scheduler.schedule()
        if sequences:
            step = self.attempt = Step(sequences, start)
            self._launch(step, is_prefill)
            self.in_flight.append(step)
        num_tokens = 0
        while self.in_flight:
            step = self.attempt = self.in_flight[0]
            if step.output is None:  # the tokens of all steps before it are known by now
                self._sample(step)
            # On a GPU the step that was launched last is collected by the next call, unless all requests have
            # ended: then it was launched before we knew that.
            if self._overlap and step.sequences is sequences and self.unfinished:
                break
            self._collect(self.in_flight.pop(0))
            num_tokens = num_tokens or step.num_tokens
        self.seconds += time.perf_counter() - start
        ended = self.ended
        try:
            self.ended, self.attempt = [], None
            return [(seq.seq_id, seq.completion_token_ids) for seq in ended], num_tokens
        except BaseException:  # Ctrl-C: the next call returns them
            self.ended = ended
            raise

    def begin(self) -> None:
        """
        Before the engine's requests change. What is broken off from here on, at whatever line, is undone by
        the next call: whoever gets to the end sets `attempt` to None.
        """
        self.check_usable()
        if self.attempt is not None:
            self.recover()
        self.attempt = Step([])

    def _launch(self, step: Step, is_prefill: bool) -> None:
        """Have the device begin a step."""
        sequences = step.sequences
        step.batch = self.batches.prefill(sequences) if is_prefill else self.batches.decode(sequences)
        step.num_tokens = len(step.batch.token_ids) if is_prefill else -len(sequences)
        self.tell("launching", step)
        step.output = self.model_runner.call("run", step.batch)
        step.drawing = self.scheduler.advance(sequences)

    def _sample(self, step: Step) -> None:
        """
        Finish a step whose sampling has waited for what logits processors make of all tokens before. On a GPU
        its forward pass runs meanwhile.
        """
        processors = selected(self.parts.logits_processors, step.batch.wanted)
        step.output = self.model_runner.call(
            "sample", {each.name: each.host_input(step.sequences) for each in processors}
        )

    def _collect(self, step: Step) -> None:
        """Wait for a step's tokens, and end the sequences that end with them."""
        token_ids = step.output.token_ids()
        self.check_usable()  # where a rank has failed the tokens are worthless
        for name, tensors in step.output.tensors.items():
            self.parts.logits_processor(name).record(step.sequences, [*step.drawing], tensors)
        finished = self.scheduler.postprocess(step.drawing, token_ids)
        self.notify("after_step", step)
        for seq in finished:
            self.end(seq, seq.finish_reason, seq.stop_reason)

    def end(self, seq: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        """End a sequence, also one that its newest token has ended for another reason."""
        self.scheduler.end(seq, reason, stop_reason)
        if seq.seq_id in self.unfinished:  # else an observer has ended it
            self.ended.append(seq)
            del self.unfinished[seq.seq_id]
            self.notify("ended", seq)

    def abort(self, request_id: int) -> None:
        """
        End a request and free its blocks at once. Its result has the tokens so far and the finish_reason
        "abort". If there is no such request, or it has finished, this does nothing.
        """
        self.begin()
        if request_id in self.unfinished:
            self.end(self.unfinished[request_id], "abort")
        self.attempt = None

    def recover(self) -> None:
        """
        Undo the call that was broken off. What it has written to the KV cache is unknown, so nothing in the
        cache is kept; all requests are dropped but those that have ended and those that an observer keeps.
        """
        self.in_flight = []
        if self.model_runner is not None:  # not shut down in the middle of its work
            try:
                self.model_runner.call("reset")
                self.batches.reset()
            except Exception as error:
                message = f"the engine cannot go on after a step that failed: {error}"
                raise EngineDeadError(message) from error
        kept = [seq for observer in self.parts.observers for seq in observer.failed(self.attempt)]
        self.unfinished = {seq.seq_id: seq for seq in kept}
        self.scheduler.clear(kept)
        self.notify("cleared")
        if kept:
            self.notify("added", kept)
        self.attempt = None

    def is_finished(self) -> bool:
        """Whether no request is left."""
        return not (self.unfinished or self.ended or self.in_flight)

    def clear(self) -> None:
        """Drop every request."""
        self.unfinished, self.ended, self.attempt = {}, [], Step([])
        if self.ranks and self.ranks.failures:
            self.exit()
        self.recover()

    def check_usable(self) -> None:
        """Raise EngineDeadError if the engine was shut down or has lost a rank."""
        if self.ranks is not None:
            self.ranks.check()
        if self.model_runner is None:
            raise EngineDeadError(SHUT_DOWN)
