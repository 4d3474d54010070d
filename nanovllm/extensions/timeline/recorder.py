"""Keeps what happens in an engine: steps, what each sequence did in them, and what happened to blocks.

Knows nothing about pages. Times are in milliseconds after the first request; steps are counted in the
order in which they were launched, and what is decided while a step is scheduled belongs to that step.
"""

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.block_manager import Hit
from nanovllm.engine.interfaces import Observer
from nanovllm.engine.sequence import Sequence

MAX_STEPS = 20_000
MAX_EVENTS = 400_000  # of blocks
MAX_COMPUTED = 5_000_000  # tokens
MAX_TOKENS = 150_000  # whose ids are kept for the page


@dataclass
class RecordedStep:
    is_prefill: bool
    start: float
    num_sequences: int
    num_tokens: int
    special: str  # why it took longer than others of its kind, or ""
    host: float = 0.0  # time from its beginning until the device could begin
    device: float = 0.0  # time that the device worked on it alone
    end: float = 0.0
    num_used_blocks: int = 0


@dataclass
class RecordedSequence:
    """
    `spans` are [kind, first step, last step, ...] in order. "waiting" has no more; "prefill" goes on with the
    tokens that the KV cache had before, those computed, and how many of those before were found there at this
    admission; "decode" with the tokens that it had before.
    """

    seq: Sequence
    arrived: int
    spans: list[list[Any]] = field(default_factory=list)
    first_token: int | None = None  # the step that drew it
    preempted: list[int] = field(default_factory=list)  # before these steps
    ended: int | None = None
    hashes: list[int] = field(default_factory=list)


class Recorder(Observer):
    watches = True

    def __init__(self, write: Callable[["Recorder"], None]):
        """`write` is called once, when the engine ends, by `exit()` or with Python."""
        self.write = write
        self.steps: list[RecordedStep] = []
        self.sequences: dict[int, RecordedSequence] = {}  # by seq_id, in order of arrival
        # (step, event, block, seq_id, index of the block in the sequence's table)
        self.block_events: list[tuple[Any, ...]] = []
        self.cut = ""
        self.num_blocks = self.block_size = 0
        self.in_flight: list[tuple[Any, RecordedStep]] = []
        self.num_recordings = 0
        self.kinds: set[bool] = set()  # of steps that have run: whether a prefill
        self.hits: dict[int, int] = {}  # by seq_id, tokens found at an admission, until its step is launched
        self.num_computed = 0
        self.origin = self.last_end = 0.0

    # --- what the engine tells ---

    def started(self, engine: Any) -> None:
        atexit.register(self.stop)
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.block_size = engine.config.kvcache_block_size
        self.num_blocks = engine.config.num_kvcache_blocks

    def added(self, sequences: list[Sequence]) -> None:
        self.origin = self.origin or time.perf_counter()
        for seq in sequences:
            known = self.sequences.get(seq.seq_id)  # kept after a failure: it begins anew
            if known is None and not self.cut:
                known = self.sequences[seq.seq_id] = RecordedSequence(seq, len(self.steps))
            if known is not None:
                known.spans.append(["waiting", len(self.steps), len(self.steps)])

    def admitted(self, seq: Sequence, hit: Hit) -> None:
        self.hits[seq.seq_id] = hit.num_tokens
        for index, block_id in enumerate(hit.blocks):
            self.note("hit", block_id, seq.seq_id, index)

    def preempted(self, seq: Sequence) -> None:
        if (known := self.sequences.get(seq.seq_id)) is not None:
            known.preempted.append(len(self.steps))
            known.spans.append(["waiting", len(self.steps), len(self.steps)])

    def launching(self, step: Any) -> None:
        """The step's sequences still have what it is about to compute in `num_scheduled_tokens`."""
        if self.cut:
            return
        number = len(self.steps)
        self.num_computed += abs(step.num_tokens)
        if number == MAX_STEPS or len(self.block_events) >= MAX_EVENTS or self.num_computed > MAX_COMPUTED:
            self.cut = f"recorded up to step {number}"
            # Those that only wait would be kept for nothing.
            self.sequences = {i: known for i, known in self.sequences.items() if len(known.spans) > 1}
            return
        self.mark_capture()
        is_prefill = step.batch.is_prefill
        recorded = RecordedStep(
            is_prefill,
            self.to_ms(step.started),
            len(step.sequences),
            abs(step.num_tokens),
            self.special(is_prefill),
        )
        recorded.host = self.to_ms(time.perf_counter()) - recorded.start
        recorded.num_used_blocks = len(self.engine.scheduler.block_manager.used_block_ids)
        self.steps.append(recorded)
        self.in_flight.append((step, recorded))
        for seq in step.sequences:
            self.record_progress(number, seq, is_prefill)

    def after_step(self, step: Any) -> None:
        while self.in_flight:
            launched, recorded = self.in_flight.pop(0)
            if launched is step:
                break
        else:
            return
        recorded.end = self.to_ms(time.perf_counter())
        # The device cannot begin a step before it has ended the one in front.
        recorded.device = recorded.end - max(recorded.start + recorded.host, self.last_end)
        self.last_end = recorded.end
        for seq, position in step.drawing.items():
            known = self.sequences.get(seq.seq_id)
            if known is not None and position == seq.num_prompt_tokens:
                known.first_token = len(self.steps) - len(self.in_flight) - 1

    def ended(self, seq: Sequence) -> None:
        if (known := self.sequences.get(seq.seq_id)) is not None:
            known.ended = max(known.arrived, len(self.steps) - 1 - len(self.in_flight))
            known.hashes = seq.block_hashes

    def block(self, event: str, block_id: int, seq: Sequence | None) -> None:
        index = len(seq.block_table) - 1 if event == "taken" else 0
        self.note(event, block_id, None if seq is None else seq.seq_id, index)

    def cleared(self) -> None:
        self.note("cleared")
        self.in_flight.clear()

    def stop(self) -> None:
        atexit.unregister(self.stop)
        if self.steps:
            self.write(self)
            self.steps = []

    # --- what that means ---

    def note(self, event: str, block_id: int = 0, seq_id: int | None = None, index: int = 0) -> None:
        """What happened to a block, as long as steps are recorded."""
        if not self.cut:
            self.block_events.append((len(self.steps), event, block_id, seq_id, index))

    def to_ms(self, moment: float) -> float:
        return (moment - self.origin) * 1000

    def special(self, is_prefill: bool) -> str:
        """The first prefill and the first decode compile and allocate what all others use."""
        is_first = is_prefill not in self.kinds
        self.kinds.add(is_prefill)
        return "warm-up" if is_first else ""

    def mark_capture(self) -> None:
        """See whether the step before this one was recorded as a CUDA graph."""
        runner = self.engine.model_runner
        if getattr(runner, "graphs", None) is None:
            return
        if self.steps and len(runner.decoded) > self.num_recordings:
            self.steps[-1].special = "capture"
        self.num_recordings = len(runner.decoded)

    def record_progress(self, number: int, seq: Sequence, is_prefill: bool) -> None:
        if (known := self.sequences.get(seq.seq_id)) is None:
            return
        spans, before = known.spans, seq.num_computed_tokens
        last = spans[-1] if spans else None
        if last and last[0] == "waiting":
            last[2] = max(last[1], number - 1)
            if last[1] == number:
                spans.pop()
        if is_prefill:
            spans.append(
                ["prefill", number, number, before, seq.num_scheduled_tokens, self.hits.pop(seq.seq_id, 0)]
            )
        elif last and last[0] == "decode" and last[2] == number - 1:
            last[2] = number
        else:
            spans.append(["decode", number, number, before])
