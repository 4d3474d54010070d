"""Records prefills of few tokens as CUDA graphs, as decode steps are: else the GPU waits for the host.

Starting the kernels of all layers one by one takes the host longer than the GPU computes some hundred tokens.
A prefill is padded to one of a few sizes. The padding is a sequence of its own, which sees no keys and is not
stored.
"""

from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.engine.cuda_graphs import Step
from nanovllm.engine.interfaces import Observer
from nanovllm.engine.memory import bytes_left
from nanovllm.utils.context import Context, get_context, set_context

NUM_TOKENS = 64, *range(128, 1025, 128)
NUM_BOUNDS = 16  # of sequences: where each begins, and where the last one, which is padding, ends
# Graphs keep memory of their own, which the engine has not counted when it made the KV cache. So it must have
# left that much of the card free.
SPARE_BYTES = 1 << 30

Kind = tuple[int, bool]  # how many tokens, and whether keys come from the cache


class ShortPrefills(Observer):
    """
    Takes the place of the model's `forward` when the engine is ready. Where there is little memory to spare,
    or recording fails, prefills run eagerly.
    """

    def __init__(self) -> None:
        self.recorded: dict[Kind, Step] = {}
        self.modules: list[nn.Module] = []  # the model first
        self.is_off = False

    def started(self, engine: Any) -> None:
        self._engine = engine
        runner = engine.model_runner
        self.modules = [*runner.model.modules()]
        runner.model.forward = self.forward
        share = engine.config.gpu_memory_utilization
        self.is_off = bytes_left(runner.device, 1.0) - bytes_left(runner.device, share) < SPARE_BYTES
        # What graphs read. It is aligned as in other steps, or there would be more kernels to compile.
        new = partial(torch.zeros, dtype=torch.int32, device=runner.device)
        self.tokens = new(2, NUM_TOKENS[-1], dtype=torch.int64)  # ids and positions
        self.slots = new(NUM_TOKENS[-1])
        self.bounds_q, self.bounds_k = new(2, NUM_BOUNDS)
        self.tables = new(NUM_BOUNDS, runner.slots.inputs.block_tables.shape[1])

    def stop(self) -> None:
        self.recorded.clear()
        self.modules.clear()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """As the model's."""
        step, count = get_context(), len(input_ids)
        kind = self._kind_of(step, count)
        if kind is None:
            return self._compute(input_ids, positions)
        try:
            if kind not in self.recorded:
                capture = self._engine.model_runner.graphs.capture
                # `_padded` sets a context of its own; the step's is still needed for its logits.
                self.recorded[kind] = copy_context().run(capture, lambda: partial(self._padded, kind), False)
        except Exception:  # too little memory, say
            self.is_off = True
            return self._compute(input_ids, positions)
        self.tokens[:, :count] = torch.stack((input_ids, positions))
        self.slots.fill_(-1)[:count] = step.slot_mapping
        known = len(step.cu_seqlens_q)
        self.bounds_q.fill_(kind[0])[:known] = step.cu_seqlens_q
        self.bounds_k.copy_(step.cu_seqlens_k[-1])[:known] = step.cu_seqlens_k
        if step.block_tables is not None:
            self.tables[: known - 1] = step.block_tables
        return self.recorded[kind]()()[:count]

    def _kind_of(self, step: Context, count: int) -> Kind | None:
        """Of the graph for this step. None: it has to run eagerly."""
        if not step.is_prefill or self.is_off or self._engine.model_runner.graphs is None:
            return None
        if count > NUM_TOKENS[-1] or len(step.cu_seqlens_q) >= NUM_BOUNDS:
            return None
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.modules):
            return None  # somebody wants to see the step
        return next(n for n in NUM_TOKENS if n >= count), step.block_tables is not None

    def _padded(self, kind: Kind) -> Tensor:
        """The forward pass that is recorded: of the tensors that `forward` fills for each step."""
        num_tokens, is_cached = kind
        set_context(
            True,
            cu_seqlens_q=self.bounds_q,
            cu_seqlens_k=self.bounds_k,
            max_seqlen_q=num_tokens,
            max_seqlen_k=self._engine.config.max_model_len,
            slot_mapping=self.slots[:num_tokens],
            block_tables=self.tables if is_cached else None,
        )
        return self._compute(*self.tokens[:, :num_tokens])

    def _compute(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        model = self.modules[0]
        return type(model).forward(model, input_ids, positions)
