"""One rank's part of the engine: holds the model and the KV cache, and turns a `Batch` into tokens.

Knows tensors and devices; nothing about sequences, queues or text. Rank 0 lives in the user's process; every
method runs on every rank. Follow `run`.
"""

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.config import Config
from nanovllm.distributed.group import Group, use_group
from nanovllm.engine.batch import Batch, StepOutput
from nanovllm.engine.cuda_graphs import RESERVED_BYTES, CudaGraphs, Step, get_graph_sizes
from nanovllm.engine.interfaces import Parts, notify
from nanovllm.engine.kv_cache import KVCache
from nanovllm.engine.memory import bytes_left, bytes_taken_by, largest_batch, most_positions
from nanovllm.engine.slots import DeviceSlots, SlotLayout, to_device
from nanovllm.kernels.decode_inputs import DecodeInputs, decode_inputs
from nanovllm.kernels.runtime import HAVE_TRITON, on_default_stream
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler, SamplingStep, selected
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.loader import load_model, pack_weights
from nanovllm.utils.torch_defaults import torch_defaults

Inputs = tuple[Tensor, Tensor, SamplingStep]  # token ids and positions, int64 [tokens]
Draw = Callable[[], StepOutput]  # enqueues what follows a step's logits
Kind = tuple[int, Hashable, int]  # of a decode step: its batch size, plan_key and wanted, see Batch


class ModelRunner:
    def __init__(
        self, config: Config, parts: Parts, group: Group | None = None, ranks: Any = None, device: Any = None
    ):
        """`group` is how several ranks compute together, `ranks` how rank 0 calls the others."""
        self.config = config
        self.parts = parts
        self.notify = partial(notify, parts.observers)
        self.ranks = ranks
        self.group = group or Group()
        self.device = device or config.device_of(self.group.rank)

    def start(self, checkpoint: Checkpoint) -> None:
        """Build and load the model, and take the memory that there is for the KV cache."""
        with self.on_device():
            try:
                self.notify("starting", self.group.rank, partial(ModelRunner, parts=self.parts))
                self.build()
                with torch_defaults(self.config.torch_dtype, self.device):
                    load_model(self.model, checkpoint)
                pack_weights(self.model)
                self.notify("before_warmup", self.model)
                self.group.connect(self.device)
                self.allocate_kv_cache(self.warmup_model())
            except BaseException as error:
                self.notify("stop")
                self.notify("failing", error)
                raise

    def build(self) -> None:
        """Make the model, without its weights, and what else `run` works with."""
        config, parts = self.config, self.parts
        # A table of rotations for more would only take memory.
        hf_config = replace(config.hf_config, max_model_len=most_positions(config, self.device))
        with torch_defaults(config.torch_dtype, self.device), use_group(self.group):
            self.model = parts.build_model(hf_config)
            self.sampler = Sampler()
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        self.backend = parts.make_backend(config, config.device_of(self.group.rank), layers, parts.layout)
        self.backend.allocate(self.device)
        for layer in layers:
            layer.backend = self.backend.for_layer(layer)
        self.kv_cache = KVCache(config, layers, self.device, parts.layout)
        layout = SlotLayout(config)
        self.slots = DeviceSlots(layout, self.device)
        self.waiting = 0  # those that wait for the host, see Batch.wanted
        self.receivers = {
            "attention": self.backend.receive,
            "prefix_cache": lambda message: parts.prefix_cache.receive(message, self.kv_cache),
        }
        for i, processor in enumerate(parts.logits_processors):
            processor.allocate(layout.num_slots, config.hf_config.vocab_size, self.device)
            self.waiting |= processor.waits_for_host << i
            self.receivers[processor.name] = processor.receive
        self.graph_sizes = get_graph_sizes(config.max_num_seqs)
        # The references of the attention kernels read numbers on the host.
        has_kernels = HAVE_TRITON and self.device.type == "cuda" and config.attention_backend != "torch"
        self.graphs = CudaGraphs(self.device) if has_kernels and not config.enforce_eager else None
        self.unsampled: tuple[Draw, Batch] | None = None  # what draws the step that waits for the host
        self.decoded: dict[Kind, Step] = {}  # what runs the kinds of steps there have been

    def on_device(self) -> contextlib.AbstractContextManager:
        """Work on this runner's GPU, whatever the user's thread works on."""
        return on_default_stream(self.device)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method on this rank; on rank 0, on every rank. Returns its result on this one."""
        try:
            if self.ranks is not None:
                return self.ranks.call(name, *args)
            with self.on_device():
                return getattr(self, name)(*args)
        except Exception as error:
            self.notify("failing", error)
            raise

    def exit(self) -> None:
        """Free the device's memory, except what the group shares, which other ranks may still have mapped."""
        with self.on_device():
            self.reset()
            self.notify("stop")
            for part in (self.backend, *self.parts.logits_processors):
                part.close()
            self.model = self.kv_cache = self.slots = self.receivers = self.graphs = self.decoded = None
            torch.cuda.empty_cache()

    def reset(self) -> None:
        """After a step that failed: wait for what was enqueued, and forget what the slots hold."""
        if self.device.type == "cuda":
            # Not for the device, which CUDA forbids while another thread captures a graph.
            torch.cuda.current_stream().synchronize()
        for part in (self.slots, *self.parts.logits_processors):
            part.reset()
        self.unsampled = None

    @torch.inference_mode()
    def warmup_model(self) -> int:
        """Run the largest steps there can be. Returns the bytes of memory that steps and messages take."""
        if self.device.type != "cuda":
            return 0
        config, processors = self.config, self.parts.logits_processors
        batch = largest_batch(config, config.max_num_batched_tokens, processors)
        num_bytes = sum(processor.reserved_bytes for processor in processors)
        num_bytes += bytes_taken_by(lambda: self.run(batch), self.device)
        if self.graphs is not None:
            kind = config.max_num_seqs, self.backend.largest_plan, batch.wanted
            step = partial(self.decode_step, kind)
            self.graphs.reserve(bytes_taken_by(lambda: step()(), self.device))
            num_bytes += RESERVED_BYTES
            if not self.parts.can_record(step, self.device):
                self.graphs = None
        self.slots.reset()
        return num_bytes

    def allocate_kv_cache(self, reserved_bytes: int) -> None:
        """Take all memory that the options allow and nothing else needs. ValueError if that is too little."""
        num_blocks = self.config.num_kvcache_blocks
        if num_blocks == -1:
            budget = bytes_left(self.device, self.config.gpu_memory_utilization) - reserved_bytes
            num_blocks = self.kv_cache.num_blocks_in(min(self.group.gather("budget", budget)))
        self.kv_cache.allocate(num_blocks)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput | None:
        """
        Enqueue a step on the device, and the copy of its output to the host, without waiting for them. Where
        a logits processor waits for the host this is the step's forward pass, and `sample` must follow.
        """
        if batch.slot_updates is not None:
            self.slots.apply(batch.slot_updates)
        self.receive(batch.messages)
        draw = self.forward(batch)
        if not batch.wanted & self.waiting:
            return draw().to_host(batch)
        self.unsampled = draw, batch
        return None

    @torch.inference_mode()
    def sample(self, messages: dict[str, Any]) -> StepOutput:
        """Finish the step that `run` has begun, with what logits processors have waited for."""
        self.receive(messages)
        (draw, batch), self.unsampled = self.unsampled, None
        return draw().to_host(batch)

    def receive(self, messages: dict[str, Any]) -> None:
        for name, message in messages.items():
            if message is not None:
                self.receivers[name](message)

    def forward(self, batch: Batch) -> Draw:
        """Enqueue a step up to its logits. What is returned enqueues the rest."""
        if batch.is_prefill:
            return self.run_model(*self.prepare_prefill(batch))
        size = batch.num_sequences
        if self.graphs is not None:
            size = next(each for each in self.graph_sizes if each >= size)
        kind = size, batch.plan_key, batch.wanted
        if kind not in self.decoded:
            self.capture_cudagraph(kind)
        return self.decoded[kind]()

    def decode_step(self, kind: Kind) -> Draw:
        """Like `forward`. Depends on the device's memory alone, so that it can be captured."""
        return self.run_model(*self.prepare_decode(kind))

    def prepare_prefill(self, batch: Batch) -> Inputs:
        """Also sets the context."""
        put = partial(to_device, device=self.device)
        slots = put(batch.slots)
        _, step = self.prepare_sample(slots, batch.wanted)
        # Whether some keys were computed by earlier steps, or are computed by neighbours in this one.
        from_cache = batch.lens_q != batch.lens_k
        set_context(
            True,
            cu_seqlens_q=put(np.cumsum([0, *batch.lens_q], dtype=np.int32)),
            cu_seqlens_k=put(np.cumsum([0, *batch.lens_k], dtype=np.int32)),
            max_seqlen_q=max(batch.lens_q),
            max_seqlen_k=max(batch.lens_k),
            slot_mapping=put(batch.slot_mapping),
            block_tables=self.prepare_block_tables(slots) if from_cache else None,
        )
        return put(batch.token_ids), put(batch.positions), step

    def prepare_decode(self, kind: Kind) -> Inputs:
        """Of the slots that decode, with padding behind them. Also sets the context."""
        batch_size, plan_key, wanted = kind
        inputs, step = self.prepare_sample(self.slots.batch[:batch_size], wanted)
        set_context(
            False,
            slot_mapping=inputs.slot_mapping,
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            attention_plan=self.backend.inputs(batch_size, plan_key) if plan_key else None,
        )
        return inputs.input_ids, inputs.positions, step

    def prepare_block_tables(self, slots: Tensor) -> Tensor:
        """int32 [sequences, blocks of the longest possible one]; nobody reads beyond a sequence's end."""
        return self.slots.inputs.block_tables[slots]

    def prepare_sample(self, slots: Tensor, wanted: int) -> tuple[DecodeInputs, SamplingStep]:
        """What the slots say of the step, for which each counts one token more from now on."""
        inputs = decode_inputs(slots, self.slots.inputs, self.config.kvcache_block_size)
        processors = selected(self.parts.logits_processors, wanted)
        return inputs, SamplingStep(slots, inputs.temperatures, inputs.seeds, inputs.context_lens, processors)

    def run_model(self, input_ids: Tensor, positions: Tensor, step: SamplingStep) -> Draw:
        """From token ids to the logits after them; what is returned draws. Ends the context that was set."""
        try:
            hidden_states = self.model(input_ids, positions)
            for processor in step.processors:
                processor.hidden(hidden_states, self.model.lm_head, step)
            return partial(self.sample_logits, self.model.compute_logits(hidden_states), step)
        finally:
            reset_context()

    def sample_logits(self, logits: Tensor, step: SamplingStep) -> StepOutput:
        """
        From logits [sequences, this rank's vocabulary] to the next tokens, which become the next step's
        inputs.
        """
        processors, lm_head = step.processors, self.model.lm_head
        step.vocab_start = lm_head.vocab_start
        if any(processor.needs_whole for processor in processors):
            logits, step.vocab_start = lm_head.gather(logits), 0
        raw_logits = logits
        for processor in processors:
            logits = processor.apply(logits, step)
        tokens = self.sampler(logits, step)
        for processor in processors:
            processor.drawn(raw_logits, tokens, step)
        self.slots.inputs.tokens.index_put_((step.slots,), tokens.int())
        return StepOutput(tokens, step.told)

    @torch.inference_mode()
    def capture_cudagraph(self, kind: Kind) -> None:
        """Record a kind of decode step, if there are graphs. Done when it is needed: starting is quick."""
        if not self.decoded:
            self.notify("before_first_decode")
        step = partial(self.decode_step, kind)
        if self.graphs is not None:
            step = self.graphs.capture(step, bool(kind[2] & self.waiting))
        self.decoded[kind] = step
