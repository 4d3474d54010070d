"""One rank's part of the engine: holds the model and the KV cache, and turns a `Batch` into tokens.

Knows tensors and devices; nothing about sequences, queues or text. Rank 0 lives in the user's process; every
method runs on every rank. Follow `run`.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.checkpoints.base import Checkpoint
from nanovllm.config import Config
from nanovllm.distributed.group import Group, use_group
from nanovllm.engine.batch import Batch, StepOutput, token_positions
from nanovllm.engine.cuda_graphs import RESERVED_BYTES, CudaGraphs, get_graph_sizes
from nanovllm.engine.device_rows import DeviceRows, RowLayout
from nanovllm.engine.interfaces import Parts
from nanovllm.engine.kv_cache import KVCache
from nanovllm.engine.memory import bytes_left, bytes_taken_by, explain_memory, largest_batch, most_positions
from nanovllm.engine.transfer import to_device
from nanovllm.extensions.logits.edits import DeviceEdits
from nanovllm.extensions.logits.scoring import Scoring, score
from nanovllm.extensions.structured.masks import TokenMasks
from nanovllm.kernels.runtime import HAVE_TRITON
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler, TopLogprobs, top_logprobs
from nanovllm.models import pack_weights
from nanovllm.sampling_params import Needs
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.torch_defaults import torch_defaults


class ModelInputs(NamedTuple):
    """What a step computes, on the device."""

    input_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    sampling: "SamplingInputs"


class SamplingInputs(NamedTuple):
    """What drawing the next tokens takes, on the device."""

    rows: torch.Tensor  # int32 [sequences], see device_rows.py
    temperatures: torch.Tensor  # float32 [sequences]
    seeds: torch.Tensor  # int64 [sequences]
    positions: torch.Tensor  # int64 [sequences], of the tokens to be drawn


class Computed(NamedTuple):
    """A step up to its logits."""

    logits: torch.Tensor  # [sequences, this rank's vocabulary]
    sampling: SamplingInputs
    scores: TopLogprobs | None  # of prompts


class ModelRunner:
    def __init__(
        self, config: Config, parts: Parts, group: Group | None = None, ranks: Any = None, device: Any = None
    ):
        """`group` is how several ranks compute together, `ranks` how rank 0 calls the others."""
        self.config, self.parts, self.ranks = config, parts, ranks
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
            self.sampler = Sampler(self.model.lm_head.vocab_start)
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        layout = parts.make_layout(config)
        self.backend = parts.make_backend(config, config.device_of(self.group.rank), layers, layout)
        self.backend.allocate(self.device)
        for layer in layers:
            layer.layout, layer.backend = layout, self.backend.for_layer(layer)
        self.kv_cache = KVCache(config, layers, self.device, layout)
        self.rows = DeviceRows(RowLayout(config), self.device)
        # The torch twins of the attention kernels read numbers on the host.
        reads = config.attention_backend == "torch" or not HAVE_TRITON or self.device.type != "cuda"
        self.graph_sizes = get_graph_sizes(config.max_num_seqs)
        self.graphs = None if config.enforce_eager or reads else CudaGraphs(self.device)
        self.undrawn: Callable[[], StepOutput] | None = None  # the rest of a step that waits for masks
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
        return self.ranks.call(self, name, args) if self.ranks is not None else getattr(self, name)(*args)

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
            self.backend.close()
            self.model = self.sampler = self.kv_cache = self.rows = self.undrawn = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def reset(self) -> None:
        """After a step that failed: wait for what was enqueued, and forget what the rows hold."""
        with self.on_device():
            self._wait_for_device()
            self.rows.reset()
            self.undrawn = None

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """
        Run the largest steps there can be, with all that requests can ask for, so that the memory they take
        is known and kept free (`step_bytes`).
        """
        self.step_bytes = 0
        if self.device.type != "cuda":
            return
        batch = largest_batch(self.config, self.config.max_num_batched_tokens)
        self.step_bytes = bytes_taken_by(lambda: self.run(batch), self.device)
        if self.graphs is not None:
            padding = self.padding(self.config.max_num_seqs, self.backend.largest_plan)
            step = functools.partial(self.decode_step, *padding, batch.needs)
            self.graphs.reserve(bytes_taken_by(step, self.device))
            if not self.parts.can_record(step, self.device):
                self.graphs = None
        self.rows.reset()

    def allocate_kv_cache(self) -> None:
        """Take all memory that the options allow and nothing else needs. ValueError if that is too little."""
        num_blocks = self.config.num_kvcache_blocks
        if num_blocks == -1:
            budget = bytes_left(self.device, self.config.gpu_memory_utilization)
            if self.device.type == "cuda":
                budget -= self.step_bytes + DeviceEdits.reserved_bytes
                budget -= RESERVED_BYTES if self.graphs is not None else 0
            num_blocks = self.kv_cache.num_blocks_in(min(self.group.gather("budget", budget)))
        self.kv_cache.allocate(num_blocks)

    @explain_memory
    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput | None:
        """
        Enqueue a step on the device without waiting for it. A later step may overwrite its output. A step
        that needs masks, which depend on tokens that are still being drawn, is finished by `draw`.
        """
        if batch.row_updates is not None:
            self.rows.apply(batch.row_updates)
        messages = batch.messages or {}
        if "prefix_cache" in messages:
            self.parts.prefix_cache.receive(messages["prefix_cache"], self.kv_cache)
        if "attention" in messages:
            self.backend.receive(messages["attention"])
        if batch.is_prefill:
            computed = self.run_model(self.prepare_prefill(batch), batch.scoring)
            rest = functools.partial(self._draw, batch.needs, computed)
        else:
            if not self.has_decoded:
                self.has_decoded = True
                self._notify("before_first_decode")
            rest = self._begin_decode(batch)
        if batch.needs & Needs.MASKS:
            self.undrawn = rest
            return None
        return rest()

    def _begin_decode(self, batch: Batch) -> Callable[[], StepOutput]:
        """Enqueue a decode step as far as anything can wait for masks. Returns what enqueues the rest."""
        if self.graphs is None:
            inputs = self.prepare_decode(*self.decoding(batch.num_sequences, batch.plan_key))
            return functools.partial(self._draw, batch.needs, self.run_model(inputs))
        size = next(size for size in self.graph_sizes if size >= batch.num_sequences)
        key = size, batch.plan_key, batch.needs
        if key not in self.graphs:
            self.capture_cudagraph(*key)
        if batch.needs & Needs.MASKS:
            self.graphs.replay(key, 0)
            return functools.partial(self.graphs.replay, key, 1)
        return functools.partial(self.graphs.replay, key, 0)

    @explain_memory
    @torch.inference_mode()
    def draw(self, masks: TokenMasks) -> StepOutput:
        """Finish the step that `run` has begun."""
        self.rows.edits.masks.receive(masks)
        rest, self.undrawn = self.undrawn, None
        return rest()

    def decode_step(self, rows: torch.Tensor, plan: Any, needs: Needs) -> StepOutput:
        """
        For these rows, int32 [batch], with this plan of attention. Depends on the device's memory alone, so
        that it can be captured.
        """
        return self._draw(needs, self.run_model(self.prepare_decode(rows, plan)))

    def prepare_prefill(self, batch: Batch) -> ModelInputs:
        """Also sets the context."""
        rows = to_device(batch.rows, self.device)
        # Whether some keys were computed by earlier steps, or are computed by neighbours in this one.
        from_cache = not np.array_equal(batch.lens_q, batch.lens_k)
        inputs = ModelInputs(
            to_device(batch.token_ids, self.device, torch.int64),
            to_device(token_positions(batch.lens_q, batch.lens_k), self.device, torch.int64),
            self.prepare_sample(rows, to_device(batch.lens_k, self.device, torch.int64)),
        )
        set_context(
            True,
            cu_seqlens_q=to_device(_starts(batch.lens_q), self.device),
            cu_seqlens_k=to_device(_starts(batch.lens_k), self.device),
            max_seqlen_q=int(batch.lens_q.max()),
            max_seqlen_k=int(batch.lens_k.max()),
            slot_mapping=to_device(batch.slot_mapping, self.device),
            block_tables=self.prepare_block_tables(rows) if from_cache else None,
        )
        return inputs

    def prepare_decode(self, rows: torch.Tensor, plan: Any = None) -> ModelInputs:
        """Also sets the context."""
        inputs = self.rows.next_inputs(rows)
        set_context(
            False,
            slot_mapping=inputs.slot_mapping,
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            attention_plan=plan,
        )
        sampling = SamplingInputs(rows, inputs.temperatures, inputs.seeds, inputs.next_positions)
        return ModelInputs(inputs.input_ids, inputs.positions, sampling)

    def prepare_block_tables(self, rows: torch.Tensor) -> torch.Tensor:
        """int32 [sequences, blocks of the longest possible one]; nobody reads beyond a sequence's end."""
        return self.rows.inputs.block_tables[rows]

    def prepare_sample(self, rows: torch.Tensor, positions: torch.Tensor) -> SamplingInputs:
        inputs = self.rows.inputs
        return SamplingInputs(rows, inputs.temperatures[rows], inputs.seeds[rows], positions)

    def run_model(self, inputs: ModelInputs, scoring: Scoring | None = None) -> Computed:
        """From token ids to the logits after them. Ends the context that `prepare_...` has set."""
        try:
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            scores = score(self.model.lm_head, hidden_states, scoring) if scoring is not None else None
            return Computed(self.model.compute_logits(hidden_states), inputs.sampling, scores)
        finally:
            reset_context()

    def _draw(self, needs: Needs, computed: Computed) -> StepOutput:
        """From logits to the next tokens, which become the next step's inputs."""
        logits, (rows, temperatures, seeds, positions), scores = computed
        if is_whole := needs | Needs.MASKS != Needs.MASKS:  # masks alone do with a shard of the logits
            logits = self.model.lm_head.gather(logits)
        edits = self.rows.edits
        edited, thresholds, masks = edits.edit_logits(logits, rows, positions, temperatures, needs)
        tokens = self.sampler(edited, temperatures, seeds, positions, thresholds, masks, is_whole)
        self.rows.note_drawn(rows, positions, tokens, needs)
        logprobs = top_logprobs(logits, tokens) if needs & Needs.LOGPROBS else None
        return StepOutput(tokens, logprobs, scores)

    @torch.inference_mode()
    def capture_cudagraph(self, batch_size: int, plan_key: Hashable, needs: Needs) -> None:
        """Record the decode step for this many rows. Done when first needed, so that starting is quick."""
        self.decode_step(*self.padding(batch_size, plan_key), needs)
        inputs = self.decoding(batch_size, plan_key)
        key, draw = (batch_size, plan_key, needs), functools.partial(self._draw, needs)
        if needs & Needs.MASKS:
            self.graphs.capture(key, lambda: self.run_model(self.prepare_decode(*inputs)), draw)
        else:
            self.graphs.capture(key, lambda: self.decode_step(*inputs, needs))

    def decoding(self, batch_size: int, plan_key: Hashable) -> tuple[torch.Tensor, Any]:
        """The rows of the decode step, with padding behind them, and its plan of attention."""
        plan = self.backend.inputs(batch_size, plan_key) if plan_key else None
        return self.rows.batch[:batch_size], plan

    def padding(self, batch_size: int, plan_key: Hashable) -> tuple[torch.Tensor, Any]:
        """Rows that no sequence has, and a plan without work."""
        plan = self.backend.inputs(batch_size, plan_key, is_empty=True) if plan_key else None
        return torch.full_like(self.rows.batch[:batch_size], self.rows.padding_row), plan


def _starts(lengths: np.ndarray) -> np.ndarray:
    """int32 [sequences + 1], where each begins if they stand one after another, and where the last ends."""
    return np.cumsum([0, *lengths.tolist()]).astype(np.int32)
