"""The asyncio front: any number of tasks share one engine, come and go as they like, and get their tokens."""

import asyncio
import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest
from async_engines import idle
from engines import assert_empty
from forked_ranks import forked_ranks  # noqa: F401

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.extensions.api.async_llm import Worker
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

GREEDY = SamplingParams(0, 20, True)
OPTIONS = dict(**EXACT, num_kvcache_blocks=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(
        make_checkpoint(
            tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=257, num_hidden_layers=1
        )
    )


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def engine(request, folder):
    with AsyncLLM(folder, **OPTIONS) as engine:
        engine.llm._overlap = request.param
        yield engine
        asyncio.run(idle(engine))
        assert_empty(engine.llm)
        assert not engine.llm.unfinished


def make_prompts(count: int) -> list[list[int]]:
    pick = random.Random(0)
    return [[pick.randrange(256) for _ in range(pick.randint(1, 30))] for _ in range(count)]


def make_params(count: int) -> list[SamplingParams]:
    pick = random.Random(1)
    return [SamplingParams(pick.choice([0.0, 1.0]), pick.randint(1, 12), True, seed=i) for i in range(count)]


async def collect(stream) -> str:
    return "".join([piece async for piece in stream])


def test_hundreds_of_streams_at_once_give_the_texts_of_the_offline_run(folder):
    prompts, params = make_prompts(400), make_params(400)
    with LLM(folder, **OPTIONS) as llm:
        expected = [result["text"] for result in llm.generate(prompts, params, use_tqdm=False)]

    async def run(engine: AsyncLLM) -> list[str]:
        streams = map(engine.stream, prompts, params)
        return await asyncio.gather(*map(collect, streams))

    with AsyncLLM(folder, **OPTIONS) as engine:
        assert asyncio.run(run(engine)) == expected
        assert_empty(engine.llm)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_step_is_told_to_those_alone_whom_it_touched(folder, monkeypatch, is_streamed):
    """However many tasks wait, also if they give up, the newest first."""
    told, tell, params = [], Worker.notify, SamplingParams(0, 2, True)
    monkeypatch.setattr(Worker, "notify", lambda *args: (told.append(args), tell(*args)))

    async def run(engine: AsyncLLM) -> list:
        use = (lambda *args: collect(engine.stream(*args))) if is_streamed else engine.generate
        tasks = [asyncio.create_task(use([i % 256], params)) for i in range(1000)]
        await tasks[0]
        for task in reversed(tasks[100:]):
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with AsyncLLM(folder, **OPTIONS, max_num_seqs=4) as engine:
        *results, last = asyncio.run(run(engine))[:101]
        asyncio.run(idle(engine))
        assert isinstance(last, asyncio.CancelledError)
        assert not any(isinstance(result, BaseException) for result in results)
        assert len(told) <= engine.llm.stats()["num_generated_tokens"]


def test_results_are_those_of_generate(engine, folder):
    params = [
        GREEDY,
        SamplingParams(1.0, 9, True, n=3, seed=2),
        SamplingParams(0, 30, True, stop_token_ids=[3]),
    ]
    # They begin differently: which of them are computed in one step, and so find nothing cached, is open.
    prompts = [[first, *prompt] for first, prompt in enumerate(make_prompts(3))]
    with LLM(folder, **OPTIONS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)

    async def run():
        return await asyncio.gather(*map(engine.generate, prompts, params))

    assert asyncio.run(run()) == expected


def test_one_engine_serves_one_event_loop_after_another(engine):
    first, second = (asyncio.run(collect(engine.stream([1, 2, 3], GREEDY))) for _ in range(2))
    assert first == second != ""


@pytest.mark.parametrize("how", ["cancelled", "left early", "out of time"])
def test_whoever_leaves_takes_the_request_along(engine, how):
    endless = SamplingParams(0, 400, True)

    async def leave() -> None:
        stream = engine.stream([5] * 20, endless)
        async for _ in stream:
            if how == "left early":
                break
        await stream.aclose()

    async def run() -> dict:
        other = asyncio.create_task(engine.generate([1, 2, 3], GREEDY))
        if how == "left early":
            await leave()
        elif how == "out of time":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(engine.generate([5] * 20, endless), 0.05)
        else:
            task = asyncio.create_task(leave())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        result = await other
        await idle(engine)
        assert_empty(engine.llm)
        assert engine.llm.stats()["num_generated_tokens"] < 400
        return result

    assert len(asyncio.run(run())["token_ids"]) == 20


def test_a_bad_request_is_refused_and_disturbs_nobody(engine):
    async def run():
        good = asyncio.create_task(engine.generate([1, 2, 3], GREEDY))
        with pytest.raises(ValueError, match="999"):
            await engine.generate([999], GREEDY)
        with pytest.raises(ValueError, match="one completion"):
            await collect(engine.stream([1], SamplingParams(n=2)))
        return await good

    assert len(asyncio.run(run())["token_ids"]) == 20


@pytest.mark.parametrize("where", ["batches.prefill", "scheduler.add"])
def test_an_exception_of_the_engine_reaches_all_and_leaves_it_usable(engine, monkeypatch, where):
    def broken(*_):
        raise MemoryError("there is none left")

    async def run():
        expected = await engine.generate([1, 2, 3], GREEDY)
        part, name = where.split(".")
        monkeypatch.setattr(getattr(engine.llm, part), name, broken)
        results = await asyncio.gather(
            *(engine.generate([i], GREEDY) for i in range(5)), return_exceptions=True
        )
        assert [str(result) for result in results] == ["there is none left"] * 5
        monkeypatch.undo()
        assert (await engine.generate([1, 2, 3], GREEDY))["token_ids"] == expected["token_ids"]

    asyncio.run(run())


def test_an_engine_that_ends_with_a_rank_is_tried_no_second_time(folder, monkeypatch):
    async def run() -> list:
        tasks = [engine.generate([i], GREEDY) for i in range(5)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    with AsyncLLM(folder, **OPTIONS, tensor_parallel_size=2) as engine:
        monkeypatch.setattr(engine.llm.model_runner, "run_model", lambda *_: 1 / 0)
        for result in asyncio.run(asyncio.wait_for(run(), 60)):
            assert isinstance(result, EngineDeadError) and "ZeroDivisionError" in str(result)


def test_a_request_that_comes_while_exit_is_under_way_is_told(folder, monkeypatch):
    engine = AsyncLLM(folder, **OPTIONS)
    read = engine.llm.prompts.make_request

    def read_and_exit(*args, **options):
        engine.exit()
        return read(*args, **options)

    monkeypatch.setattr(engine.llm.prompts, "make_request", read_and_exit)
    with pytest.raises(RuntimeError, match=r"exit\(\)"):
        asyncio.run(asyncio.wait_for(engine.generate([1], GREEDY), 10))


def test_a_loop_that_is_closed_takes_its_requests_with_it(engine, monkeypatch):
    """Also those that wait: there is room for 15 at a time."""
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(engine.generate([i % 256], SamplingParams(0, 400, True))) for i in range(100)]
    loop.run_until_complete(asyncio.sleep(0.05))
    assert engine._worker.listeners
    for task in tasks:
        task._log_destroy_pending = False
    loop.close()
    num_drawn = engine.llm.stats()["num_generated_tokens"]
    asyncio.run(idle(engine))
    assert engine.llm.stats()["num_generated_tokens"] < num_drawn + 60
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # each task says that its loop is closed
    del task, tasks
    gc.collect()


def test_an_engine_that_is_deleted_ends_its_thread(folder):
    engine = AsyncLLM(folder, **OPTIONS)
    asyncio.run(engine.generate([1], GREEDY))
    worker = engine._worker
    del engine
    gc.collect()
    assert not worker.thread.is_alive() and worker.llm.model_runner is None


PROGRAM = """
import asyncio
from nanovllm import AsyncLLM, SamplingParams
engine = AsyncLLM({folder!r}, **{options!r})
async def main():
    async for piece in engine.stream([1, 2] * 20, SamplingParams(0, 400, True)):
        break
    raise SystemExit(3)
asyncio.run(main())
"""


def test_a_program_may_end_with_requests_under_way(tmp_path):
    sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=6)  # a step takes milliseconds
    folder = make_checkpoint(tmp_path, "qwen3", vocab_size=257, **sizes)
    program = PROGRAM.format(folder=str(folder), options=OPTIONS)
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 3, result.stderr


def test_exit_ends_the_requests_under_way(folder):
    engine = AsyncLLM(folder, **OPTIONS)

    async def run():
        tasks = [asyncio.create_task(engine.generate([i], SamplingParams(0, 400, True))) for i in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.exit)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RuntimeError) and "exit()" in str(result)
        with pytest.raises(RuntimeError, match=r"exit\(\)"):
            await engine.generate([1], GREEDY)

    asyncio.run(run())
    engine.exit()
    assert not engine._worker.thread.is_alive()


def test_a_completion_that_the_context_ends_is_said_once(engine):
    with pytest.warns(UserWarning, match="max_tokens=9 reaches beyond the context of 512 tokens") as said:
        result = asyncio.run(engine.generate([65] * 509, SamplingParams(0, 9, True)))
    assert len(said) == 1 and len(result["token_ids"]) == 3 and result["finish_reason"] == "length"
    with pytest.warns(UserWarning, match="max_tokens=9"):
        assert len(asyncio.run(collect(engine.stream([65] * 509, SamplingParams(0, 9, True))))) == 3
