"""CUDA graphs on a CPU: a step is recorded operation by operation, and a replay computes each of them again
from the same tensors into the same tensors.

So a replay knows no more than a GPU's would: Python does not run again, a tensor that was made anew after the
capture is not found, and numbers read on the host while recording are an error. Kernels are recorded as one
operation each; their references, which stand for them, may read numbers.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from nanovllm.engine.batch import StepOutput
from nanovllm.extensions.logits.kernels import filtering, logit_edits
from nanovllm.extensions.prefixes.kernels import shared_prefix
from nanovllm.extensions.structured.kernels import token_masks
from nanovllm.kernels import decode_inputs, kv_store, sampling
from nanovllm.layers import attention

REFERENCES = [
    (filtering, "filter_thresholds_torch"),
    (logit_edits, "apply_rules_torch"),
    (logit_edits, "apply_token_flags_torch"),
    (shared_prefix, "cascade_attention_torch"),
    (token_masks, "apply_masks_torch"),
    (attention, "paged_decode_attention_torch"),
    (attention, "varlen_prefill_attention_torch"),
    (decode_inputs, "decode_inputs_torch"),
    (kv_store, "store_kvcache_torch"),
    (sampling, "sample_torch"),
]
HOST_READS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "_to_host",
}
GARBAGE = 1 << 27  # where an int32 index would be far outside any table


def tensors_in(values: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided]  # others are weights of a CPU


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable, tuple, dict, list[torch.Tensor]]] = []  # with their results
        self.made: list[torch.Tensor] = []  # in the graph's own memory
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what a capture must leave as it was

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"{name} is read on the host while a graph is captured"
        if name in ("index", "index_put_"):
            assert all(each.dtype != torch.bool for each in tensors_in(args[1])), "a mask is read on the host"
        return self.record(func, args, kwargs or {}, func._schema.is_mutable)

    def record(self, func: Callable, args: tuple, kwargs: dict, is_mutable: bool) -> Any:
        tensors = tensors_in((args, kwargs))
        known = {memory_of(each) for each in tensors}
        for tensor in tensors if is_mutable else ():
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self.before.setdefault(memory_of(tensor), (whole, whole.clone()))
        result = func(*args, **kwargs)
        results = tensors_in(result)
        self.operations.append((func, args, kwargs, results))
        self.made += [each for each in results if memory_of(each) not in known]
        return result

    def undo(self) -> None:
        for tensor, before in self.before.values():
            tensor.copy_(before)
        self.before.clear()

    def replay(self) -> None:
        for func, args, kwargs, results in self.operations:
            for place, found in zip(results, tensors_in(func(*args, **kwargs)), strict=True):
                if memory_of(place) != memory_of(found):  # else it was changed in place, or is a view
                    place.copy_(found)


_recorders: list[Recorder] = []  # the one that records, if there is one


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    _recorders.append(recorder)
    try:
        with recorder:
            yield
    finally:
        _recorders.pop()


class RecordedGraphs:
    """In place of `CudaGraphs`: `install` puts it there."""

    def __init__(self) -> None:
        self.graphs: list[list[Recorder]] = []
        self.num_replays = 0

    def capture(self, step: Callable[[], Callable[[], Any]], in_two: bool) -> Callable[[], Callable[[], Any]]:
        recorders: list[Recorder] = []

        def record(stage: Callable[[], Any]) -> Any:
            recorders.append(Recorder())
            with recording(recorders[-1]):
                return stage()

        try:
            result = record(record(step)) if in_two else record(lambda: step()())
        finally:
            for recorder in reversed(recorders):
                recorder.undo()
        self.graphs.append(recorders)

        def finish() -> Any:
            self.replay(recorders[1:])
            return result

        def replay() -> Callable[[], Any]:
            for others in self.graphs:  # all graphs share their memory
                for tensor in (tensor for recorder in others for tensor in recorder.made):
                    tensor.fill_(GARBAGE if tensor.dtype != torch.bool else True)
            self.replay(recorders[:1])
            return finish

        return replay

    def replay(self, recorders: list[Recorder]) -> None:
        for recorder in recorders:
            recorder.replay()
            self.num_replays += 1


def install(llm: Any, patch: pytest.MonkeyPatch) -> RecordedGraphs:
    """Drive the engine as on a GPU: with graphs, and each step launched before the one before it is read."""
    for module, name in REFERENCES:
        patch.setattr(module, name, as_kernel(getattr(module, name)))
    patch.setattr(StepOutput, "to_host", functools.partialmethod(copy_to_host, StepOutput.to_host))
    patch.setattr(llm, "_overlap", True)
    graphs = RecordedGraphs()
    patch.setattr(llm.model_runner, "graphs", graphs)
    return graphs


def copy_to_host(output: StepOutput, to_host: Callable[..., StepOutput], batch: Any) -> StepOutput:
    """The next step overwrites what is in the graphs' memory."""
    tensors = {name: tuple(map(torch.clone, found)) for name, found in output.tensors.items()}
    return to_host(StepOutput(output.tokens.clone(), tensors), batch)


def as_kernel(reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reference)
    def launch(*args: Any, **kwargs: Any) -> Any:
        if not _recorders:
            return reference(*args, **kwargs)
        with _disable_current_modes():
            return _recorders[-1].record(reference, args, kwargs, True)

    return launch
