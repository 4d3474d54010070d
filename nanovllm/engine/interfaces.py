"""What an engine is put together from: one part for each place where another can stand.

assembly.py chooses the parts that a configuration asks for. They go down as arguments, so nothing below knows
where they come from. Every rank assembles its own: parts hold functions and tensors, which no process can
send to another.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.distributed.group import Group
from nanovllm.engine.block_manager import Hit, PrefixCache
from nanovllm.engine.scheduler import Admission, SchedulingPolicy
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import SamplingStep
from nanovllm.sampling_params import SamplingParams


class Observer:
    """
    Is told what an engine does. The first methods are called on every rank, in the thread that works there;
    those from `started` on by the loop, on rank 0's host. What one raises ends the start or the step.
    """

    watches = False  # whether those from admitted to preempted are called

    def starting(self, rank: int, make_runner: Callable) -> None:
        """
        Before anything is on the device. make_runner(config, group=, device=) makes another ModelRunner of
        the same parts, whose `build()` makes the model without weights.
        """

    def before_warmup(self, model: nn.Module) -> None:
        """
        The weights are there, and the first kernels are about to be launched. Hooks of torch on the model's
        modules are called in steps that run eagerly, not in those of a CUDA graph.
        """

    def before_first_decode(self) -> None:
        """The engine's first decode step is about to be enqueued."""

    def failing(self, error: BaseException) -> None:
        """The start or a call of the runner is about to raise this. May raise what says more."""

    def stop(self) -> None:
        """The runner ends, or could not be started."""

    def started(self, engine: Any) -> None:
        """The engine, of which this is a weak proxy, is ready."""

    def added(self, sequences: list[Sequence]) -> None:
        """These have been queued, or are kept after a failure and begin anew."""

    def admitted(self, seq: Sequence, hit: Hit) -> None:
        """The sequence has got a slot, and blocks for all its tokens; the hit is what the cache had."""

    def block(self, event: str, block_id: int, seq: Sequence | None) -> None:
        """
        A block was "taken", a new one at the end of a sequence's table; "closed", and is found from now on;
        "freed" by a sequence; or "forgotten": it is found no more, and seq is None.
        """

    def launching(self, step: Any) -> None:
        """The batch of this `Step` is complete, and is about to be run."""

    def preempted(self, seq: Sequence) -> None:
        """The sequence has lost its blocks, and waits again."""

    def after_step(self, step: Any) -> None:
        """
        The tokens of this `Step` have been recorded, and nobody has been told yet. `LLMEngine.end` may be
        called. An error about one of the sequences should name it in an attribute `sequence`.
        """

    def ended(self, seq: Sequence) -> None:
        """The sequence has ended; the step that tells so may still fail."""

    def failed(self, step: Any) -> Iterable[Sequence]:
        """
        A call was broken off while it worked on this Step. Returns the unfinished sequences to keep; those
        that no observer keeps are dropped.
        """
        return ()

    def cleared(self) -> None:
        """Nothing is queued or running any more; those that are kept follow in `added`."""


class LogitsProcessor:
    """
    Changes logits before a token is drawn from them, or tells something about them; for those requests whose
    parameters want it, and at no cost in steps without any of these.

    Every rank has one of its own. Its host half, which is used on rank 0, knows sequences; its device half
    knows slots and tensors, and learns what it needs from messages, which are pickled. What the processor
    knows of a request is in `Request.own`, under its name. A step's `apply` gets the logits of
    all its sequences: the device half has neutral settings for slots whose sequences do not want it.
    """

    name = ""  # a unique one
    fields: tuple[str, ...] = ()  # of SamplingParams, which it serves
    order = 0  # processors are applied in rising order
    needs_whole = True  # `apply` and `drawn` want all logits, not this rank's part of the vocabulary
    changes_logits = True  # `apply` does
    prefill_only = False  # it has nothing to do with decode steps
    waits_for_host = False  # `apply` needs `host_input` of all tokens before: sampling waits for the host
    reads_slowly = False  # `read` may take seconds, and may be called in any thread
    reserved_bytes = 0  # of a device's memory that messages may take, beside what `allocate` takes

    # The host half
    def start(self, config: Any, prompts: Any) -> None:
        """Requests are about to be read, by `prompts`. The config is complete."""

    def wants(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters needs this processor."""
        return False

    def read(self, request: Any, where: str) -> Any:
        """
        Check a request that wants it; nothing has changed yet. ValueError for what cannot be served; messages
        call its parameters `where`. What is returned all completions have in their `own`.
        """

    def prepare(self, sequences: list[Sequence]) -> Any:
        """
        What every rank is to `receive` before it prefills these; None: nothing. Called for every prefill step
        after the first with a sequence that wants it.
        """

    def largest(self, length: int) -> Any:
        """
        The same for the largest step there can be, whose memory is measured and whose first prompt has so
        many tokens. Changes nothing.
        """

    def host_input(self, sequences: list[Sequence]) -> Any:
        """
        What every rank is to `receive` before it samples for these, if sampling waits for the host. All of
        their tokens are known. An error about one of them names it in an attribute `sequence`.
        """

    def record(self, sequences: list[Sequence], drawing: list[Sequence], tensors: tuple[Tensor, ...]) -> None:
        """
        What `hidden` or `drawn` has put into `step.told` is here. The step was about these sequences, the
        first of which draw tokens, not recorded yet. Those of earlier steps are.
        """

    # The device half
    def allocate(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Take the memory that does not depend on requests. All slots have neutral settings."""

    def receive(self, message: Any) -> None:
        """What a host half has prepared."""

    def hidden(self, hidden_states: Tensor, lm_head: Any, step: SamplingStep) -> None:
        """
        Put what it has to tell of all tokens that the step computes into `step.told`, under its name.
        hidden_states is [tokens, hidden size].
        """

    def apply(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """
        The logits [sequences, vocabulary] to draw from. May change them in place, and `step.lowest`. Who
        wants those of the model in `drawn` is applied first, and returns a copy for the others to change.
        """
        return logits

    def drawn(self, raw_logits: Tensor, tokens: Tensor, step: SamplingStep) -> None:
        """The same of the tokens, int64 [sequences], that were drawn."""

    # Both halves
    def reset(self) -> None:
        """After a step that failed: no slot has a sequence, and no step is under way."""

    def close(self) -> None:
        """The engine ends."""


def notify(observers: Iterable[Observer], event: str, *args: Any) -> None:
    """Call this method of each."""
    for observer in observers:
        getattr(observer, event)(*args)


@dataclass
class Parts:
    """What `assembly` names makes of a Config. `logits_processors` are sorted by their `order`."""

    build_model: Callable  # ModelConfig -> the model, with memory for its weights
    layout: Any  # CacheLayout
    make_backend: Callable  # (Config, device, attention layers, CacheLayout) -> AttentionBackend
    make_ranks: Callable  # (number of ranks, make_collectives) -> Ranks
    make_collectives: Callable = Group  # (rank, size, store, check) -> Group, with several ranks
    observers: tuple[Observer, ...] = ()
    prefix_cache: PrefixCache = field(default_factory=PrefixCache)
    admissions: tuple[Admission, ...] = ()  # who may keep a sequence from running
    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    logits_processors: tuple[LogitsProcessor, ...] = ()
    # (decode step, device) -> whether it can be recorded as a CUDA graph; asked once, in the warm-up.
    can_record: Callable = lambda _step, _device: True

    def __post_init__(self) -> None:
        self.logits_processors = tuple(sorted(self.logits_processors, key=lambda each: each.order))

    def logits_processor(self, name: str) -> LogitsProcessor:
        return next(processor for processor in self.logits_processors if processor.name == name)
