"""One rank's part of the engine: holds the model and the KV cache, and turns a `Batch` into tokens.

Knows tensors and devices; nothing about sequences, queues or text. Rank 0 lives in the user's process; every
method runs on every rank. Follow `run`.
"""

import contextlib
import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.checkpoints import Checkpoint
from nanovllm.config import Config
from nanovllm.distributed.group import Group, use_group
from nanovllm.engine.batch import Batch, StepOutput, token_positions
from nanovllm.engine.compile_ahead import CompileAhead, launch_every_kernel
from nanovllm.engine.cuda_graphs import RESERVED_BYTES, CudaGraphs, get_graph_sizes
from nanovllm.engine.device_rows import DeviceRows, RowLayout, can_group
from nanovllm.engine.edits import DeviceEdits
from nanovllm.engine.kv_cache import KVCache
from nanovllm.engine.memory import bytes_left, bytes_taken_by, explain_memory, largest_batch
from nanovllm.engine.scoring import Scoring, score
from nanovllm.engine.transfer import to_device
from nanovllm.kernels.runtime import HAVE_TRITON
from nanovllm.kernels.shared_prefix import SharedPrefixes
from nanovllm.layers.attention import Attention, get_backend
from nanovllm.layers.sampler import Sampler, TopLogprobs, top_logprobs
from nanovllm.models import build_model, pack_weights
from nanovllm.sampling_params import Needs
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.torch_defaults import dtype_lock, torch_defaults


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


class ModelRunner:
    @explain_memory
    def __init__(
        self, config: Config, checkpoint: Checkpoint,
        rank: int = 0, group: Group | None = None, ranks: Any = None,
    ):  # fmt: skip
        """With several ranks: `group` is how they compute together, `ranks` how rank 0 calls the others."""
        self.rank, self.ranks = rank, ranks
        self.device = config.device_of(rank)
        group = group or Group()
        with self.on_device():
            make_runner = functools.partial(ModelRunner.without_weights, config, group)
            launches = functools.partial(launch_every_kernel, make_runner)
            with dtype_lock:  # a fork while another thread holds it would leave it locked for ever
                self.kernels = CompileAhead(self.device, rank, config, launches)
            try:
                self._build(config, config.hf_config, group)
                with torch_defaults(config.torch_dtype, self.device), use_group(group):
                    load_model(self.model, checkpoint)
                pack_weights(self.model)
                self.kernels.wait_for_warmup()
                group.connect(self.device, config.torch_dtype, config.max_num_seqs)
                self.warmup_model()
                self.allocate_kv_cache()
            except BaseException:
                self.kernels.stop()
                raise

    @classmethod
    def without_weights(cls, config: Config, group: Group) -> "ModelRunner":
        """On the CPU, for `launch_every_kernel`. Two layers launch all the kernels that there are."""
        hf_config = config.hf_config
        hf_config = replace(hf_config, num_hidden_layers=min(2, hf_config.num_hidden_layers))
        runner = object.__new__(cls)
        runner.rank, runner.device = group.rank, torch.device("cpu")
        runner._build(config, hf_config, Group(group.rank, group.size))
        return runner

    def _build(self, config: Config, hf_config: Any, group: Group) -> None:
        """Make the model, without its weights, and what else `run` works with."""
        self.config = config
        self.group = group
        with torch_defaults(config.torch_dtype, self.device), use_group(group):
            self.model = build_model(hf_config, config.quantization)
            self.sampler = Sampler(self.model.lm_head.vocab_start)
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        backend = get_backend(config, config.device_of(self.rank), layers)
        for layer in layers:
            layer.backend = backend
        self.kv_cache = KVCache(config, layers, self.device)
        self.rows = DeviceRows(RowLayout(config), self.device)
        # The torch twins of the attention kernels read numbers on the host, and so may transformers' code.
        reads = config.attention_backend == "torch" or not HAVE_TRITON or not config.hf_config.architectures
        is_eager = config.enforce_eager or self.device.type != "cuda" or reads
        self.graph_sizes = get_graph_sizes(config.max_num_seqs)
        self.graphs = None if is_eager else CudaGraphs(self.device)

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
            self.kernels.stop()
            if self.graphs is not None:
                self.graphs.close()
            self.group.leave()
            self.model = self.sampler = self.kv_cache = self.rows = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def reset(self) -> None:
        """After a step that failed: wait for what was enqueued, and forget what the rows hold."""
        with self.on_device():
            self._wait_for_device()
            self.rows.reset()

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
            padding = self.padding(self.config.max_num_seqs, can_group(self.config))
            step = functools.partial(self.decode_step, *padding, batch.needs)
            self.graphs.reserve(bytes_taken_by(step, self.device))
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
    def run(self, batch: Batch) -> StepOutput:
        """Enqueue a step on the device without waiting for it. A later step may overwrite its output."""
        if batch.row_updates is not None:
            self.rows.apply(batch.row_updates)
        if batch.is_prefill:
            if batch.block_copies is not None:
                self.kv_cache.copy_blocks(*to_device(batch.block_copies, self.device))
            return self.run_model(self.prepare_prefill(batch), batch.needs, batch.scoring)
        self.kernels.wait()
        if self.graphs is None:
            return self.decode_step(*self.decoding(batch.num_sequences, batch.is_grouped), batch.needs)
        size = next(size for size in self.graph_sizes if size >= batch.num_sequences)
        key = size, batch.is_grouped, batch.needs
        if key not in self.graphs:
            self.capture_cudagraph(*key)
        return self.graphs.replay(key)

    def decode_step(self, rows: torch.Tensor, shared: SharedPrefixes | None, needs: Needs) -> StepOutput:
        """
        For these rows, int32 [batch], and what they share. Depends on the device's memory alone, so that it
        can be captured.
        """
        return self.run_model(self.prepare_decode(rows, shared), needs)

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

    def prepare_decode(self, rows: torch.Tensor, shared: SharedPrefixes | None = None) -> ModelInputs:
        """Also sets the context."""
        inputs = self.rows.next_inputs(rows)
        set_context(
            False,
            slot_mapping=inputs.slot_mapping,
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            shared=shared,
        )
        sampling = SamplingInputs(rows, inputs.temperatures, inputs.seeds, inputs.next_positions)
        return ModelInputs(inputs.input_ids, inputs.positions, sampling)

    def prepare_block_tables(self, rows: torch.Tensor) -> torch.Tensor:
        """int32 [sequences, blocks of the longest possible one]; nobody reads beyond a sequence's end."""
        return self.rows.inputs.block_tables[rows]

    def prepare_sample(self, rows: torch.Tensor, positions: torch.Tensor) -> SamplingInputs:
        inputs = self.rows.inputs
        return SamplingInputs(rows, inputs.temperatures[rows], inputs.seeds[rows], positions)

    def run_model(self, inputs: ModelInputs, needs: Needs, scoring: Scoring | None = None) -> StepOutput:
        """From token ids to the tokens drawn after them. Ends the context that `prepare_...` has set."""
        try:
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            scores = score(self.model.lm_head, hidden_states, scoring) if scoring is not None else None
            tokens, logprobs = self._draw(self.model.compute_logits(hidden_states), inputs.sampling, needs)
            return StepOutput(tokens, logprobs, scores)
        finally:
            reset_context()

    def _draw(
        self, logits: torch.Tensor, sampling: SamplingInputs, needs: Needs
    ) -> tuple[torch.Tensor, TopLogprobs | None]:
        """The next tokens, int64 [sequences], from this rank's logits; they become the next step's inputs."""
        rows, temperatures, seeds, positions = sampling
        if needs:
            logits = self.model.lm_head.gather(logits)
            edited, thresholds = self.rows.edits.edit_logits(logits, rows, positions, temperatures, needs)
            tokens = self.sampler(edited, temperatures, seeds, positions, thresholds, is_whole=True)
        else:
            tokens = self.sampler(logits, temperatures, seeds, positions)
        self.rows.note_drawn(rows, positions, tokens, needs)
        return tokens, top_logprobs(logits, tokens) if needs & Needs.LOGPROBS else None

    @torch.inference_mode()
    def capture_cudagraph(self, batch_size: int, is_grouped: bool, needs: Needs) -> None:
        """Record the decode step for this many rows. Done when first needed, so that starting is quick."""
        self.decode_step(*self.padding(batch_size, is_grouped), needs)
        inputs = self.decoding(batch_size, is_grouped)
        key = batch_size, is_grouped, needs
        self.graphs.capture(key, lambda: self.decode_step(*inputs, needs))

    def decoding(self, batch_size: int, is_grouped: bool) -> tuple[torch.Tensor, SharedPrefixes | None]:
        """The rows of the decode step, with padding behind them, and what its sequences share."""
        shared = self.rows.shared_prefixes(batch_size) if is_grouped else None
        return self.rows.batch[:batch_size], shared

    def padding(self, batch_size: int, is_grouped: bool) -> tuple[torch.Tensor, SharedPrefixes | None]:
        """Rows that no sequence has, and that share nothing."""
        rows, shared = self.decoding(batch_size, is_grouped)
        return torch.full_like(rows, self.rows.padding_row), shared and SharedPrefixes(
            *map(torch.zeros_like, shared)
        )


def _starts(lengths: np.ndarray) -> np.ndarray:
    """int32 [sequences + 1], where each begins if they stand one after another, and where the last ends."""
    return np.cumsum([0, *lengths.tolist()]).astype(np.int32)
