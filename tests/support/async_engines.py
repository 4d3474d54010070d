"""Engines that answer calls of asyncio."""

import asyncio

from nanovllm import AsyncLLM


async def idle(engine: AsyncLLM) -> None:
    """Until the thread has done what it was told."""
    deadline = asyncio.get_running_loop().time() + 10
    while not (engine.llm.is_finished() and not engine._worker.listeners and engine._worker.inbox.empty()):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)
