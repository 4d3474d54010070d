"""Engines under test: the core alone, what its scheduler does, and what must be left of no call."""

from unittest import mock

from block_pool import check_pool

from nanovllm import LLM
from nanovllm.engine.interfaces import Observer
from nanovllm.engine.llm_engine import LLMEngine

PlainLLM = LLM.__mro__[LLM.__mro__.index(LLMEngine) - 1]  # as llm.py has it, before extensions add to it


class Core(PlainLLM):
    """The engine without extensions, whether there are any or not."""


class Watch:
    """Notes what the scheduler does while the block runs."""

    def __init__(self, llm: LLMEngine):
        self.scheduler = llm.scheduler
        self.preemptions = self.chunks = self.most_running = self.most_tokens = 0
        self.steps: list[tuple[bool, int]] = []
        self.cached: list[int] = []

    def __enter__(self):
        schedule, preempt = self.scheduler.schedule, self.scheduler.preempt

        def watched_schedule():
            sequences, is_prefill = schedule()
            self.steps.append((is_prefill, len(sequences)))
            self.most_running = max(self.most_running, len(self.scheduler.running))
            if is_prefill:
                self.cached += [s.num_cached_tokens for s in sequences]
                self.chunks += sum(s.num_computed_tokens + s.num_scheduled_tokens < len(s) for s in sequences)
                self.most_tokens = max(self.most_tokens, sum(s.num_scheduled_tokens for s in sequences))
            return sequences, is_prefill

        def watched_preempt(*args):
            self.preemptions += 1
            return preempt(*args)

        self.patches = [
            mock.patch.object(self.scheduler, "schedule", watched_schedule),
            mock.patch.object(self.scheduler, "preempt", watched_preempt),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def observer_of(llm: LLMEngine, kind: type) -> Observer:
    return next(observer for observer in llm.parts.observers if isinstance(observer, kind))


def tokens_of(results: list[dict]) -> list[list[int]]:
    return [result["token_ids"] for result in results]


def assert_empty(llm: LLMEngine) -> None:
    assert llm.is_finished()
    manager = llm.scheduler.block_manager
    check_pool(manager, [])
    assert len(manager.free_block_ids) == len(manager.blocks)
