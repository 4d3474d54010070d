"""An engine without a model: everything of the host is real, and each step takes as long as a formula says.

Schedulers, policies, prefix caches and admissions can be compared with it in seconds, with thousands of
requests and on any computer. Tokens mean nothing: all are the same, so completions end at max_tokens.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.checkpoints.folder import Checkpoint
from nanovllm.engine.batch import Batch, StepOutput
from nanovllm.layers.attention import AttentionBackend
from nanovllm.llm import LLM


def step_seconds(batch: Batch) -> float:
    """About Qwen3-0.6B in bfloat16 on one H200: launches and weights, then tokens of prompts or sequences."""
    if batch.is_prefill:
        return 2e-3 + 3e-6 * len(batch.token_ids)
    return 1.5e-3 + 15e-6 * batch.num_sequences


class SimulatedRunner:
    """Stands where a ModelRunner would. Only `clock` changes, by what `cost` says of each batch."""

    unsampled = None

    def __init__(self, cost: Callable[[Batch], float], num_blocks: int):
        self.cost = cost
        self.clock = 0.0
        self.kv_cache = SimpleNamespace(num_blocks=num_blocks)
        self.backend = AttentionBackend()

    def call(self, name: str, *args: Any) -> Any:
        if name == "run":
            [batch] = args
            self.clock += self.cost(batch)
            return StepOutput(torch.zeros(batch.num_sequences, dtype=torch.int64), {})
        return None

    def exit(self) -> None:
        """There is nothing to free."""


class Simulator(LLM):
    """
    `Simulator(cost=step_seconds, **options)`: cost(batch) gives the seconds that a step takes; options are
    those of an engine, `extensions` among them. `clock()` gives the simulated time, which the scheduling
    policy has as well, and `wait_until(moment)` lets it pass.
    """

    def __init__(
        self, model: str = "qwen3-0.6b", cost: Callable[[Batch], float] = step_seconds, **options: Any
    ):
        self.cost = cost
        defaults = {"load_format": "dummy", "device": "cpu", "num_kvcache_blocks": 4096}
        super().__init__(model, **(defaults | options))

    def start_runner(self, checkpoint: Checkpoint) -> None:
        self.parts = self.assembly(self.config)
        self.model_runner = SimulatedRunner(self.cost, self.config.num_kvcache_blocks)
        self.parts.policy.clock = self.clock

    def clock(self) -> float:
        return self.model_runner.clock

    def wait_until(self, moment: float) -> None:
        self.model_runner.clock = max(self.model_runner.clock, moment)
