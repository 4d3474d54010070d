"""One rank's part of the engine: holds the model and the KV cache, and turns a `Batch` into tokens.

Knows tensors and devices; nothing about sequences, queues or text. Rank 0 lives in the user's process; every
method runs on every rank. Follow `run`.
"""

import contextlib
import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.config import Config
from nanovllm.distributed.group import Group, use_group
from nanovllm.engine.batch import Batch, StepOutput, token_positions
from nanovllm.engine.cuda_graphs import RESERVED_BYTES, CudaGraphs, get_graph_sizes
from nanovllm.engine.interfaces import Parts
from nanovllm.engine.kv_cache import KVCache
from nanovllm.engine.memory import bytes_left, bytes_taken_by, explain_memory, largest_batch, most_positions
from nanovllm.engine.slots import DeviceSlots, SlotLayout
from nanovllm.engine.transfer import to_device
from nanovllm.kernels.runtime import HAVE_TRITON
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler, SamplingStep, selected
from nanovllm.models import pack_weights
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.torch_defaults import torch_defaults


class ModelInputs(NamedTuple):
    """What a step computes, on the device."""

    input_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    sampling: SamplingStep


class Computed(NamedTuple):
    """A step up to its logits."""

    logits: torch.Tensor  # [sequences, this rank's vocabulary]
    sampling: SamplingStep
    tensors: dict[str, tuple[torch.Tensor, ...]]  # by logits processor, what it has to tell of all tokens


# A step between `forward` and `sample`: Batch.wanted, the key of the CUDA graph that samples, or without a
# graph what there is to sample from.
Forwarded = tuple[int, Hashable | None, Computed | None]


class ModelRunner:
    def __init__(
        self,
        config: Config,
        parts: Parts,
        group: Group | None = None,
        ranks: Any = None,
        device: Any = None,
    ):
        """`group` is how several ranks compute together, `ranks` how rank 0 calls the others."""
        self.config = config
        self.parts = parts
        self.ranks = ranks
        self.group = group or Group()
        self.device = device or config.device_of(self.group.rank)

    @explain_memory
    def start(self, checkpoint: Checkpoint) -> None:
        """Build and load the model, and take the memory that there is for the KV cache."""
        make_runner = functools.partial(ModelRunner, parts=self.parts)
        with self.on_device():
            try:
                self._notify("starting", self.group.rank, make_runner)
                self.build()
                self.load(checkpoint)
                self._notify("before_warmup")
                self.group.connect(self.device)
                self.warmup_model()
                self.allocate_kv_cache()
            except BaseException:
                self._notify("stop")
                raise

    def _notify(self, event: str, *args: Any) -> None:
        for observer in self.parts.observers:
            getattr(observer, event)(*args)

    def build(self) -> None:
        """Make the model, without its weights, and what else `run` works with."""
        config, parts = self.config, self.parts
        # A table of rotations for more would only take memory.
        num_positions = most_positions(config, self.device, self.group.size)
        hf_config = replace(config.hf_config, max_model_len=num_positions)
        with torch_defaults(config.torch_dtype, self.device), use_group(self.group):
            self.model = parts.build_model(hf_config)
            self.sampler = Sampler(self.model.lm_head, parts.logits_processors)
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        cache_layout = parts.make_layout(config)
        self.backend = parts.make_backend(config, config.device_of(self.group.rank), layers, cache_layout)
        self.backend.allocate(self.device)
        for layer in layers:
            layer.layout = cache_layout
            layer.backend = self.backend.for_layer(layer)
        self.kv_cache = KVCache(config, layers, self.device, cache_layout)
        layout = SlotLayout(config)
        self.slots = DeviceSlots(layout, self.device)
        self.processors = parts.logits_processors
        self.waiting = 0  # those that wait for the host, see Batch.wanted
        self.receivers = {"attention": self.backend.receive}
        for i, processor in enumerate(self.processors):
            processor.allocate(layout.num_slots, config.hf_config.vocab_size, self.device)
            self.waiting |= processor.waits_for_host << i
            self.receivers[processor.name] = processor.receive
        self.receivers["prefix_cache"] = lambda message: parts.prefix_cache.receive(message, self.kv_cache)
        # The references of the attention kernels read numbers on the host.
        has_kernels = HAVE_TRITON and self.device.type == "cuda" and config.attention_backend != "torch"
        self.graph_sizes = get_graph_sizes(config.max_num_seqs)
        self.graphs = None
        if has_kernels and not config.enforce_eager:
            self.graphs = CudaGraphs(self.device)
        self.unsampled: Forwarded | None = None
        self.has_decoded = False

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill the model's weights."""
        with torch_defaults(self.config.torch_dtype, self.device), use_group(self.group):
            load_model(self.model, checkpoint)
        pack_weights(self.model)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Work on this runner's GPU and its default stream, whatever the user's thread works on."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.default_stream(self.device))

    def call(self, name: str, *args: Any) -> Any:
        """Called on rank 0: call a method on every rank, and return its result on rank 0."""
        if self.ranks is None:
            return getattr(self, name)(*args)
        return self.ranks.call(self, name, args)

    def check_device(self) -> None:
        """Raise an error of the device, if there was one: other ranks than 0 never wait for it otherwise."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).query()

    def exit(self) -> None:
        """Free the device's memory, except what the group shares, which other ranks may still have mapped."""
        with self.on_device():
            self._wait_for_device()
            self._notify("stop")
            if self.graphs is not None:
                self.graphs.close()
            self.group.leave()
            for part in (self.backend, *self.processors):
                part.close()
            self.model = self.sampler = self.kv_cache = self.slots = self.unsampled = None
            self.receivers.clear()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def reset(self) -> None:
        """After a step that failed: wait for what was enqueued, and forget what the slots hold."""
        with self.on_device():
            self._wait_for_device()
            for part in (self.slots, *self.processors):
                part.reset()
            self.unsampled = None

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """Run the largest steps there can be: the memory that they take is kept free (`step_bytes`)."""
        self.step_bytes = 0
        if self.device.type != "cuda":
            return
        batch = largest_batch(self.config, self.config.max_num_batched_tokens, self.processors)
        self.step_bytes = bytes_taken_by(lambda: self.run(batch), self.device)
        if self.graphs is not None:
            empty = self.decoding(self.config.max_num_seqs, self.backend.largest_plan, is_empty=True)
            step = functools.partial(self.decode_step, *empty, batch.wanted)
            self.graphs.reserve(bytes_taken_by(step, self.device))
            if not self.parts.can_record(step, self.device):
                self.graphs = None
        self.slots.reset()

    def allocate_kv_cache(self) -> None:
        """Take all memory that the options allow and nothing else needs. ValueError if that is too little."""
        num_blocks = self.config.num_kvcache_blocks
        if num_blocks == -1:
            budget = bytes_left(self.device, self.config.gpu_memory_utilization)
            if self.device.type == "cuda":
                budget -= self.step_bytes
                budget -= sum(processor.reserved_bytes for processor in self.processors)
                budget -= RESERVED_BYTES if self.graphs is not None else 0
            num_blocks = self.kv_cache.num_blocks_in(min(self.group.gather("budget", budget)))
        self.kv_cache.allocate(num_blocks)

    @explain_memory
    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput | None:
        """
        Enqueue a step on the device without waiting for it. A later step may overwrite its output. Where a
        logits processor waits for the host this is the step's forward pass, and `sample` must follow.
        """
        if batch.slot_updates is not None:
            self.slots.apply(batch.slot_updates)
        if batch.messages is not None:
            self.receive(batch.messages)
        self.unsampled = self.forward(batch)
        return None if batch.wanted & self.waiting else self._sample()

    @explain_memory
    @torch.inference_mode()
    def sample(self, messages: dict[str, Any]) -> StepOutput:
        """Finish the step that `run` has begun, with what logits processors have waited for."""
        self.receive(messages)
        return self._sample()

    def receive(self, messages: dict[str, Any]) -> None:
        for name, message in messages.items():
            self.receivers[name](message)

    def forward(self, batch: Batch) -> Forwarded:
        """Enqueue a step up to its logits. Where a CUDA graph has all of it, that is left to `_sample`."""
        wanted = batch.wanted
        if batch.is_prefill:
            return wanted, None, self.run_model(self.prepare_prefill(batch), wanted)
        if not self.has_decoded:
            self.has_decoded = True
            self._notify("before_first_decode")
        if self.graphs is None:
            inputs = self.prepare_decode(*self.decoding(batch.num_sequences, batch.plan_key))
            return wanted, None, self.run_model(inputs)
        size = next(size for size in self.graph_sizes if size >= batch.num_sequences)
        key = size, batch.plan_key, wanted
        if key not in self.graphs:
            self.capture_cudagraph(*key)
        if wanted & self.waiting:
            self.graphs.replay(key, 0)
        return wanted, key, None

    def _sample(self) -> StepOutput:
        wanted, key, computed = self.unsampled
        self.unsampled = None
        if key is None:
            return self.sample_logits(wanted, computed)
        return self.graphs.replay(key, 1 if wanted & self.waiting else 0)

    def decode_step(self, slots: torch.Tensor, plan: Any, wanted: int) -> StepOutput:
        """For slots, int32 [batch]. Depends on the device's memory alone, so that it can be captured."""
        return self.sample_logits(wanted, self.run_model(self.prepare_decode(slots, plan)))

    def prepare_prefill(self, batch: Batch) -> ModelInputs:
        """Also sets the context."""
        slots = to_device(batch.slots, self.device)
        # Whether some keys were computed by earlier steps, or are computed by neighbours in this one.
        from_cache = not np.array_equal(batch.lens_q, batch.lens_k)
        inputs = ModelInputs(
            to_device(batch.token_ids, self.device, torch.int64),
            to_device(token_positions(batch.lens_q, batch.lens_k), self.device, torch.int64),
            self.prepare_sample(slots, to_device(batch.lens_k, self.device, torch.int64)),
        )
        set_context(
            True,
            cu_seqlens_q=to_device(_starts(batch.lens_q), self.device),
            cu_seqlens_k=to_device(_starts(batch.lens_k), self.device),
            max_seqlen_q=int(batch.lens_q.max()),
            max_seqlen_k=int(batch.lens_k.max()),
            slot_mapping=to_device(batch.slot_mapping, self.device),
            block_tables=self.prepare_block_tables(slots) if from_cache else None,
        )
        return inputs

    def prepare_decode(self, slots: torch.Tensor, plan: Any = None) -> ModelInputs:
        """Also sets the context."""
        inputs = self.slots.next_inputs(slots)
        set_context(
            False,
            slot_mapping=inputs.slot_mapping,
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            attention_plan=plan,
        )
        sampling = SamplingStep(slots, inputs.temperatures, inputs.seeds, inputs.next_positions)
        return ModelInputs(inputs.input_ids, inputs.positions, sampling)

    def prepare_block_tables(self, slots: torch.Tensor) -> torch.Tensor:
        """int32 [sequences, blocks of the longest possible one]; nobody reads beyond a sequence's end."""
        return self.slots.inputs.block_tables[slots]

    def prepare_sample(self, slots: torch.Tensor, positions: torch.Tensor) -> SamplingStep:
        inputs = self.slots.inputs
        return SamplingStep(slots, inputs.temperatures[slots], inputs.seeds[slots], positions)

    def run_model(self, inputs: ModelInputs, wanted: int = 0) -> Computed:
        """From token ids to the logits after them. Ends the context that `prepare_...` has set."""
        tensors = {}
        try:
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            for processor in selected(self.processors, wanted) if wanted else ():
                if (found := processor.hidden(hidden_states, self.model.lm_head)) is not None:
                    tensors[processor.name] = found
            return Computed(self.model.compute_logits(hidden_states), inputs.sampling, tensors)
        finally:
            reset_context()

    def sample_logits(self, wanted: int, computed: Computed) -> StepOutput:
        """From logits to the next tokens, which become the next step's inputs."""
        logits, step, tensors = computed
        tokens, told = self.sampler(logits, step, wanted)
        self.slots.note_drawn(step.slots, tokens)
        return StepOutput(tokens, tensors | told)

    @torch.inference_mode()
    def capture_cudagraph(self, batch_size: int, plan_key: Hashable, wanted: int) -> None:
        """Record the decode step for this many slots. Done when first needed, so that starting is quick."""
        self.decode_step(*self.decoding(batch_size, plan_key, is_empty=True), wanted)
        inputs = self.decoding(batch_size, plan_key)
        stages = [lambda: self.run_model(self.prepare_decode(*inputs))]
        stages += [functools.partial(self.sample_logits, wanted)]
        if not wanted & self.waiting:
            stages = [lambda: self.decode_step(*inputs, wanted)]
        self.graphs.capture((batch_size, plan_key, wanted), *stages)

    def decoding(
        self, batch_size: int, plan_key: Hashable, is_empty: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """
        The slots of the decode step, with padding behind them, and its plan of attention. An empty step has
        padding alone and no work.
        """
        slots = self.slots.batch[:batch_size]
        if is_empty:
            slots = torch.full_like(slots, self.slots.padding_slot)
        return slots, self.backend.inputs(batch_size, plan_key, is_empty) if plan_key else None


def _starts(lengths: np.ndarray) -> np.ndarray:
    """int32 [sequences + 1], where each begins if they stand one after another, and where the last ends."""
    return np.cumsum([0, *lengths.tolist()]).astype(np.int32)
