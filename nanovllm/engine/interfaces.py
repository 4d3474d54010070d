"""What an engine is put together from: one part for each place where another can stand.

assembly.py chooses the parts that a configuration asks for. They go down as arguments, so nothing below knows
where they come from. Every rank assembles its own: parts hold functions and tensors, which no process can
send to another.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nanovllm.distributed.group import Group
from nanovllm.engine.policies import Admission, PrefixCache


class Observer:
    """
    Is told what an engine is about to do, and changes none of it. Called on every rank in the thread that
    works there; what it raises ends the start or the step.
    """

    def starting(self, rank: int, make_runner: Callable[..., Any]) -> None:
        """
        Before anything is on the device. make_runner(config, group=, device=) makes another ModelRunner of
        the same parts, whose `build()` makes the model without weights.
        """

    def before_warmup(self) -> None:
        """The weights are there, and the first kernels are about to be launched."""

    def before_first_decode(self) -> None:
        """The engine's first decode step is about to be enqueued."""

    def stop(self) -> None:
        """The runner ends, or could not be started."""


def record_always(_step: Callable[[], Any], _device: torch.device) -> bool:
    """The steps of the core's models can be recorded as CUDA graphs."""
    return True


@dataclass(frozen=True)
class Parts:
    build_model: Callable[..., nn.Module]  # ModelConfig -> the model, with memory for its weights
    make_layout: Callable[..., Any]  # Config -> CacheLayout
    make_backend: Callable[..., Any]  # (Config, device, attention layers, CacheLayout) -> AttentionBackend
    make_ranks: Callable[..., Any]  # (Config, checkpoint, name of the assembly, make_collectives) -> Ranks
    make_collectives: Callable[..., Group] = Group  # (rank, size, folder, check) -> Group, with several ranks
    observers: tuple[Observer, ...] = ()
    prefix_cache: PrefixCache = field(default_factory=PrefixCache)
    admissions: tuple[Admission, ...] = ()  # who may keep a sequence from running
    # (decode step, device) -> whether it can be recorded as a CUDA graph; asked once, in the warm-up.
    can_record: Callable[..., bool] = record_always


def resolve(name: str) -> Any:
    """What "package.module:Name" names, imported: how ranks get what cannot be sent to them."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
