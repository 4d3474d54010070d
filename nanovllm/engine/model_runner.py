"""One rank's half of the engine: holds the model and the KV cache, and turns scheduled sequences into tokens.

Knows tensors, devices and memory; nothing about queues or text. Rank 0 lives in the user's process.
"""

import collections
import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.checkpoints import Checkpoint
from nanovllm.config import Config
from nanovllm.distributed.group import Group, use_group
from nanovllm.engine.compile_ahead import CompileAhead
from nanovllm.engine.decode_state import DecodeState
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.shaping import FILTERS, LOGPROBS, MARKS, RULES, Shaping
from nanovllm.engine.step_data import (
    Drawn,
    PrefillBatch,
    StepOutput,
    needed_extras,
    take_block_copies,
    take_scoring,
)
from nanovllm.kernels.all_reduce import PeerMemory
from nanovllm.kernels.runtime import HAVE_TRITON
from nanovllm.layers.attention import Attention, get_backend
from nanovllm.layers.sampler import Sampler, TopLogprobs, top_logprobs
from nanovllm.models import get_model_class
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.loader import load_model

if TYPE_CHECKING:
    from nanovllm.distributed.ranks import Ranks

CPU_KV_CACHE_BYTES = 4 << 30
GRAPH_BYTES = 512 << 20  # for what CUDA graphs take beside their tensors
MAX_BLOCKS = 1 << 18  # Python's objects for more would take longer to make than a small model to load
SCORED_AT_ONCE = 256  # prompt tokens
COPIED_AT_ONCE = 256  # blocks
ALL_EXTRAS = FILTERS | RULES | MARKS | LOGPROBS
EVERYTHING = SamplingParams(top_k=1, logit_bias={0: 1.0}, presence_penalty=1.0, logprobs=0, prompt_logprobs=0)
_default_dtype_lock = threading.RLock()  # torch has one for all threads
# By device, of engines that have ended: the workspace that cuBLAS has for a stream is never given back.
_spare_streams: dict[torch.device, collections.deque[torch.cuda.Stream]] = {}


def get_graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that CUDA graphs are made for: padding costs little where the weights decide the time."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def explain_memory(method):
    """When a device's memory runs out in there, say what can be done about it."""

    @functools.wraps(method)
    def explained(self: "ModelRunner", *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # else the step's tensors live as long as the error
            config = self.config
            raise torch.OutOfMemoryError(
                f"{error} What helps: lower gpu_memory_utilization (now {config.gpu_memory_utilization}), "
                f"max_num_seqs (now {config.max_num_seqs}) or max_num_batched_tokens (now "
                f"{config.max_num_batched_tokens}), or raise tensor_parallel_size (now "
                f"{config.tensor_parallel_size})"
            ) from error

    return explained


class ModelRunner:
    """
    `kv_cache` is [2, layers, blocks, block_size, kv_heads of this rank, head_dim]; 2 is keys and values.
    """

    @explain_memory
    def __init__(
        self,
        config: Config,
        checkpoint: Checkpoint,
        rank: int = 0,
        group: Group | None = None,
        ranks: "Ranks | None" = None,
    ):
        """`ranks` is rank 0's hold on the other members of `group`, where there are any."""
        self.config = config
        self.rank = rank
        self.group = group or Group()
        self.ranks = ranks
        self.device = config.device_of(rank)
        with self.on_device():
            launches = functools.partial(launch_every_kernel, config, self.group)
            with _default_dtype_lock:  # held by another thread it would never be free in a forked process
                self.kernels = CompileAhead(self.device, rank, config, launches)
            try:
                self._build()
                with self._defaults(), use_group(self.group):
                    load_model(self.model, checkpoint)
                self.kernels.wait_for_warmup()
                self.group.connect(self.device, config.torch_dtype, config.max_num_seqs)
                self.warmup_model()
                self.allocate_kv_cache()
            except BaseException:
                self.kernels.stop()
                raise

    def _build(self) -> None:
        """Make the model, without its weights, and what else `prefill` and `decode` work with."""
        config = self.config
        self.block_size = config.kvcache_block_size
        with self._defaults(), use_group(self.group):
            self.model = get_model_class(config.hf_config)(config.hf_config)
            self.sampler = Sampler(self.model.lm_head.vocab_start)
        self.attention_layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        backend = get_backend(config, config.device_of(self.rank))
        for layer in self.attention_layers:
            layer.backend = backend
            shape = (0, self.block_size, layer.num_kv_heads, layer.head_dim)  # no memory before the warm-up
            empty = torch.empty(shape, dtype=config.kv_cache_torch_dtype, device=self.device)
            layer.k_cache = layer.v_cache = empty
        self.state = DecodeState(
            config.max_num_seqs, -(-config.max_model_len // self.block_size), self.block_size, self.device
        )
        self.shaping = Shaping(config.max_num_seqs, config.hf_config.vocab_size, self.device)
        # The torch twins of the attention kernels look at lengths on the host, which a graph cannot.
        twins = config.attention_backend == "torch" or not HAVE_TRITON
        self.enforce_eager = config.enforce_eager or self.device.type != "cuda" or twins
        self.graph_sizes = get_graph_sizes(config.max_num_seqs)
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Drawn]] = {}  # by size and extras
        self.graph_pool = self._pool_owner = None
        self._capture_stream = None
        if self.device.type == "cuda":  # not torch's own, which is one for all devices and threads
            self._capture_stream = torch.cuda.Stream(self.device)
            with contextlib.suppress(IndexError):
                self._capture_stream = _spare_streams.setdefault(self.device, collections.deque()).pop()

    def on_device(self) -> contextlib.AbstractContextManager:
        """
        For every entry that reaches the device: work on this runner's GPU and its default stream, whichever
        the calling thread has.
        """
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.default_stream(self.device))

    @contextlib.contextmanager
    def _defaults(self):
        """New tensors get the model's dtype and device."""
        with _default_dtype_lock:
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(self.config.torch_dtype)
            try:
                with self.device:
                    yield
            finally:
                torch.set_default_dtype(dtype)

    def call(self, name: str, *args: Any) -> Any:
        """Do the same thing on every rank and return what it gives on this one, which is rank 0."""
        return self.ranks.call(self, name, args) if self.ranks is not None else getattr(self, name)(*args)

    def check_device(self) -> None:
        """Raise what went wrong on the device, if something did; nobody else would notice on this rank."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).query()

    def exit(self) -> None:
        """Free the device's memory, except what the group shares: other ranks may still have that mapped."""
        with self.on_device():
            self._wait_for_device()
            self.kernels.stop()
            for layer in self.attention_layers:
                layer.k_cache = layer.v_cache = torch.empty(0)
            self.graphs.clear()
            self._pool_owner = None
            if self._capture_stream is not None:
                _spare_streams[self.device].append(self._capture_stream)
            self.group.leave()
            self.model = self.sampler = self.kv_cache = self.state = self.shaping = None
            self.attention_layers = []
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def reset(self) -> None:
        """Wait for what was enqueued and forget what the device was told, after a step that failed."""
        with self.on_device():
            self._wait_for_device()
            self.state.reset()
            self.shaping.reset()

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """
        Run the largest steps there can be, with all that requests can ask for, so that the memory they take
        is known and kept free (`step_bytes`).
        """
        if self.device.type != "cuda":
            return
        self.step_bytes = self._memory_of(lambda: self.prefill(self._largest_prefill()))
        if not self.enforce_eager:
            # The memory that all graphs share begins as one piece in which each of them fits: it would grow
            # with every larger batch, which finds no room in what smaller ones left.
            padding = self._padding(self.config.max_num_seqs)
            num_bytes = self._memory_of(lambda: self._decode_step(padding, ALL_EXTRAS))
            piece = functools.partial(torch.zeros, max(1, num_bytes), dtype=torch.uint8, device=self.device)
            self._pool_owner, _ = self._capture(piece)
        self.shaping.reset()

    def _memory_of(self, step: Callable[[], Any]) -> int:
        """Bytes that torch has to take from the device for this."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.max_memory_reserved(self.device) - before

    def _largest_prefill(self) -> PrefillBatch:
        """As many tokens of as many sequences as a step can have, each of which asks for everything."""
        config = self.config
        num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        left = config.max_num_batched_tokens
        sequences = []
        for row in range(num_seqs):
            length = min(max(1, config.max_model_len - 1), left - (num_seqs - row - 1))
            left -= length
            seq = Sequence([0] * length, EVERYTHING)
            seq.num_scheduled_tokens, seq.row = length, row
            seq.scored_token_ids = seq.token_ids[1:][:SCORED_AT_ONCE] if row == 0 else []
            sequences.append(seq)
        return self.prepare_prefill(sequences)

    def allocate_kv_cache(self) -> None:
        """
        Take the memory that the options allow and nothing else needs. Raises ValueError if that is not
        enough.
        """
        config = self.config
        self.num_kvcache_blocks = config.num_kvcache_blocks
        layer = self.attention_layers[0]
        shape = (self.block_size, layer.num_kv_heads, layer.head_dim)
        dtype = config.kv_cache_torch_dtype
        page_bytes = int(np.prod(shape)) * dtype.itemsize  # a block's keys or values of one layer
        block_bytes = 2 * len(self.attention_layers) * page_bytes
        if config.num_kvcache_blocks == -1:
            budget = min(self.group.gather("budget", self._kv_cache_budget(COPIED_AT_ONCE * page_bytes)))
            needed = -(-config.max_model_len // self.block_size)
            if budget // block_bytes < needed:
                raise ValueError(
                    f"the KV cache of one sequence of max_model_len={config.max_model_len} tokens needs "
                    f"{needed * block_bytes:,} bytes, {needed * block_bytes - budget:,} more than there are; "
                    f"raise gpu_memory_utilization (now {config.gpu_memory_utilization}), or lower "
                    f"max_model_len or max_num_batched_tokens (now {config.max_num_batched_tokens})"
                )
            # Blocks that no sequence needs are where later prompts find the beginnings of earlier ones.
            most = MAX_BLOCKS if config.enable_prefix_caching else config.max_num_seqs * needed
            self.num_kvcache_blocks = min(most, budget // block_bytes)
        # Zeros, since a page that was never written may be read under a mask, where a NaN would survive.
        self.kv_cache = torch.zeros(
            2, len(self.attention_layers), self.num_kvcache_blocks, *shape, dtype=dtype, device=self.device
        )
        for i, layer in enumerate(self.attention_layers):
            layer.k_cache, layer.v_cache = self.kv_cache[0, i], self.kv_cache[1, i]

    def _kv_cache_budget(self, copied_bytes: int) -> int:
        """
        Bytes for the KV cache: on a GPU the allowed share of the card less what is used and what a step
        needs. Pages are copied before a step computes anything, through memory of so many bytes.
        """
        if self.device.type != "cuda":
            return CPU_KV_CACHE_BYTES
        free, total = torch.cuda.mem_get_info(self.device)
        wanted_later = max(self.step_bytes, copied_bytes) + Shaping.reserved_bytes
        wanted_later += 0 if self.enforce_eager else GRAPH_BYTES
        return int(total * self.config.gpu_memory_utilization) - (total - free) - wanted_later

    def prepare_prefill(self, sequences: list[Sequence]) -> PrefillBatch:
        """What the sequences have scheduled."""
        input_ids, positions, slots = [], [], []
        lens_q = [seq.num_scheduled_tokens for seq in sequences]
        lens_k = [seq.num_computed_tokens + seq.num_scheduled_tokens for seq in sequences]
        for seq, end in zip(sequences, lens_k, strict=True):
            position = np.arange(seq.num_computed_tokens, end, dtype=np.int32)
            input_ids.append(np.array(seq[seq.num_computed_tokens : end], dtype=np.int32))
            positions.append(position)
            if seq.block_table:
                blocks = np.array(seq.block_table, dtype=np.int32)[position // self.block_size]
                slots.append(blocks * self.block_size + position % self.block_size)
            else:  # warm-up
                slots.append(np.full_like(position, -1))
        # Some keys were computed by earlier steps, or are by neighbours in this one.
        from_cache = lens_k != lens_q
        extras = needed_extras(sequences)
        return PrefillBatch(
            np.concatenate(input_ids),
            np.concatenate(positions),
            np.concatenate(slots),
            lens_q,
            lens_k,
            self.prepare_block_tables(sequences) if from_cache else None,
            self.prepare_sample(sequences),
            np.array([seq.row for seq in sequences], dtype=np.int32),
            extras,
            self.shaping.update(sequences),
            take_block_copies(sequences),
            take_scoring(sequences),
        )

    def prepare_decode(self, sequences: list[Sequence]) -> tuple[int, np.ndarray, int]:
        """
        How many rows the step will have, what the device must be told before it (DecodeState), and what its
        sequences need beyond a temperature.
        """
        batch_size = len(sequences)
        if not self.enforce_eager:
            batch_size = next(size for size in self.graph_sizes if size >= batch_size)
        return batch_size, self.state.changes(sequences, batch_size), needed_extras(sequences)

    def prepare_block_tables(self, sequences: list[Sequence]) -> np.ndarray:
        """int32 [sequences, blocks of the longest]; what lies beyond a sequence's end is never read."""
        tables = np.zeros((len(sequences), max(len(seq.block_table) for seq in sequences)), dtype=np.int32)
        for row, seq in zip(tables, sequences, strict=True):
            row[: len(seq.block_table)] = seq.block_table
        return tables

    def prepare_sample(self, sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Temperatures, seeds and the positions of the tokens to be drawn, [sequences] each."""
        positions = [seq.num_computed_tokens + seq.num_scheduled_tokens for seq in sequences]
        return (
            np.array([seq.temperature for seq in sequences], dtype=np.float32),
            np.array([seq.seed for seq in sequences], dtype=np.int64),
            np.array(positions, dtype=np.int64),
        )

    def _to_device(self, array: np.ndarray | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        if array is None:
            return None
        tensor = torch.from_numpy(array).to(dtype)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def run_model(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """-> logits [sequences, vocabulary]."""
        return self.model.compute_logits(self.model(input_ids, positions))

    def run(self, sequences: list[Sequence], is_prefill: bool) -> list[int]:
        """Compute one step: the next token id of every sequence."""
        return self.launch(sequences, is_prefill).token_ids()

    def launch(self, sequences: list[Sequence], is_prefill: bool) -> "StepOutput":
        """Enqueue one step on all ranks without waiting for it."""
        with self.on_device():
            if not is_prefill:
                return StepOutput(self.call("decode", *self.prepare_decode(sequences)), len(sequences))
            batch = self.prepare_prefill(sequences)
            return StepOutput(self.call("prefill", batch), len(sequences), batch.scoring)

    @explain_memory
    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> Drawn:
        """Compute a prefill step."""
        if batch.shaping is not None:
            self.shaping.write(batch.shaping, self._to_device)
        if batch.block_copies is not None:
            self._copy_blocks(*self._to_device(batch.block_copies))
        try:
            input_ids, positions, sampling = self._begin_prefill(batch)
            hidden_states = self.model(input_ids, positions)
            prompt_logprobs = None
            if batch.scoring is not None:
                prompt_logprobs = self._score(hidden_states, *map(self._to_device, batch.scoring[:2]))
            logits = self.model.compute_logits(hidden_states)
            token_ids, logprobs = self._draw(logits, self._to_device(batch.rows), sampling, batch.extras)
        finally:
            reset_context()
        return Drawn(token_ids, logprobs, prompt_logprobs)

    def _copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy pages of the KV cache, int64 [blocks] both; some at a time, as they pass other memory."""
        for part in range(0, len(sources), COPIED_AT_ONCE):
            source, target = (blocks[part : part + COPIED_AT_ONCE] for blocks in (sources, targets))
            for cache in self.kv_cache.flatten(0, 1):
                cache[target] = cache[source]

    def _score(
        self, hidden_states: torch.Tensor, indices: torch.Tensor, targets: torch.Tensor
    ) -> TopLogprobs:
        """How likely the target is after each of these tokens, int64 [scored] both."""
        parts = []
        for index, target in zip(indices.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True):
            logits = self.model.lm_head.logits(hidden_states[index])
            parts.append(top_logprobs(self.model.lm_head.gather(logits), target))
        return TopLogprobs(*map(torch.cat, zip(*parts, strict=True)))

    def _draw(
        self, logits: torch.Tensor, rows: torch.Tensor, sampling: tuple[torch.Tensor, ...], extras: int
    ) -> tuple[torch.Tensor, TopLogprobs | None]:
        """
        Draw the next tokens, int64 [sequences], from this rank's logits, and make them the inputs of the next
        step for these rows of the device's states, int32 [sequences]. sampling: see prepare_sample.
        """
        if not extras:
            token_ids = self.sampler(logits, *sampling)
            self.state.feed(rows, token_ids)
            return token_ids, None
        temperatures, _, positions = sampling
        logits = self.model.lm_head.gather(logits)
        shaped, thresholds = self.shaping.apply(logits, rows, positions, temperatures, extras)
        token_ids = self.sampler(shaped, *sampling, thresholds, is_whole=True)
        self.state.feed(rows, token_ids)
        self.shaping.remember(rows, positions, token_ids, extras)
        return token_ids, top_logprobs(logits, token_ids) if extras & LOGPROBS else None

    def _begin_prefill(
        self, batch: PrefillBatch
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Input ids and positions [tokens], and what the sampler needs; sets the context."""
        set_context(
            True,
            cu_seqlens_q=self._to_device(np.cumsum([0, *batch.lens_q]), torch.int32),
            cu_seqlens_k=self._to_device(np.cumsum([0, *batch.lens_k]), torch.int32),
            max_seqlen_q=max(batch.lens_q),
            max_seqlen_k=max(batch.lens_k),
            slot_mapping=self._to_device(batch.slot_mapping, torch.int32),
            block_tables=self._to_device(batch.block_tables),
        )
        input_ids = self._to_device(batch.input_ids, torch.int64)
        positions = self._to_device(batch.positions, torch.int64)
        return input_ids, positions, tuple(map(self._to_device, batch.sampling))

    @explain_memory
    @torch.inference_mode()
    def decode(self, batch_size: int, changes: np.ndarray, extras: int) -> Drawn:
        """Compute a decode step (`prepare_decode`)."""
        self.kernels.wait()
        if changes.size:
            self.state.apply(self._to_device(changes))
        if self.enforce_eager:
            return self._decode_step(self.state.batch[:batch_size], extras)
        if (batch_size, extras) not in self.graphs:
            self.capture_cudagraph(batch_size, extras)
        graph, drawn = self.graphs[batch_size, extras]
        graph.replay()
        return drawn

    def _decode_step(self, batch: torch.Tensor, extras: int) -> Drawn:
        """
        Embedding to drawn token for these rows of the decode state, int32 [batch]. Depends on nothing but the
        device's memory, so that it can be captured once and replayed.
        """
        inputs = self.state.next_inputs(batch)
        set_context(
            False,
            slot_mapping=inputs.slot_mapping,
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
        )
        try:
            logits = self.run_model(inputs.input_ids, inputs.positions)
            sampling = inputs.temperatures, inputs.seeds, inputs.next_positions
            token_ids, logprobs = self._draw(logits, batch, sampling, extras)
        finally:
            reset_context()
        return Drawn(token_ids, logprobs, None)

    @torch.inference_mode()
    def capture_cudagraph(self, batch_size: int, extras: int = 0) -> None:
        """Record the decode step for this number of rows. Done when first needed: a start waits for none."""
        # Creates handles and compiles what is not compiled yet, which a capture cannot.
        self._decode_step(self._padding(batch_size), extras)
        step = functools.partial(self._decode_step, self.state.batch[:batch_size], extras)
        self.graphs[batch_size, extras] = self._capture(step)

    def _padding(self, batch_size: int) -> torch.Tensor:
        """Rows of the decode state that no sequence has."""
        return torch.full((batch_size,), self.state.padding_row, dtype=torch.int32, device=self.device)

    def _capture(self, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph, pool = torch.cuda.CUDAGraph(), self.graph_pool
        self.graph_pool = None  # one in which a capture has failed cannot be used again
        try:
            # Other threads of the user's program may go on using the device.
            with torch.cuda.graph(
                graph, pool, stream=self._capture_stream, capture_error_mode="thread_local"
            ):
                result = step()
        except torch.AcceleratorError as error:
            raise RuntimeError(
                "a CUDA graph could not be captured. If another thread of the program waits for the whole "
                "device (torch.cuda.synchronize), which CUDA forbids meanwhile, let it wait for a stream or "
                f"an event; enforce_eager=True does without graphs. {error}"
            ) from error
        self.graph_pool = graph.pool()
        return graph, result


@torch.inference_mode()
def launch_every_kernel(config: Config, group: Group) -> Iterator[None]:
    """
    For `CompileAhead`: launch every kernel that prefill and decode have for this model, on the CPU. Layers
    after the second are like it, and left out. Yields when the kernels of the warm-up are through.
    """
    hf_config = replace(config.hf_config, num_hidden_layers=min(2, config.hf_config.num_hidden_layers))
    config = replace(config, hf_config=hf_config, max_num_batched_tokens=16)  # kernels do not depend on it
    runner = object.__new__(ModelRunner)
    runner.config, runner.rank, runner.device = config, group.rank, torch.device("cpu")
    runner.group = Group(group.rank, group.size)
    runner._build()
    if group.size > 1:
        seqs, half_bytes = config.max_num_seqs, 1 << 20
        words = torch.empty(PeerMemory.num_words(group.size, seqs, half_bytes), dtype=torch.int32)
        addresses = [0] * group.size
        runner.group.peers = PeerMemory(group.rank, addresses, words, config.torch_dtype, seqs, half_bytes)
    batch = runner._largest_prefill()._replace(scoring=None)  # log-probabilities are torch's work
    runner.prefill(batch._replace(extras=FILTERS | RULES | MARKS))
    *smaller, largest = runner.graph_sizes
    runner._decode_step(runner._padding(largest), 0)
    yield
    for extras in (0, FILTERS, RULES | MARKS):
        runner.prefill(batch._replace(extras=extras))
    runner.prefill(batch._replace(block_tables=np.zeros((len(batch.lens_q), 1), dtype=np.int32)))
    for size in smaller:
        runner._decode_step(runner._padding(size), 0)
