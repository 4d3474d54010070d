"""An engine belongs to the process that made it and does one call at a time; others are told so."""

import copy
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cases import slow

from nanovllm import LLM, AsyncLLM, SamplingParams
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

GREEDY = SamplingParams(0, 4, True)
OPTIONS = dict(**EXACT, num_kvcache_blocks=40)
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=257))


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_an_engine_cannot_be_pickled_and_says_what_to_do(folder, kind):
    with kind(folder, **OPTIONS) as llm:
        for use in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="make one in each process that uses one, or .* AsyncLLM"):
                use(llm)


def test_a_second_thread_is_told_of_async_llm_and_disturbs_nothing(folder):
    with LLM(folder, **OPTIONS) as llm:
        [expected] = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
        results, errors = llm.generate_iter([[1, 2], [3]], [GREEDY, SamplingParams(0, 9, True)]), []

        def call() -> None:
            try:
                llm.generate([[5]], GREEDY, use_tqdm=False)
            except RuntimeError as error:
                errors.append(str(error))

        first = next(results)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert "busy" in errors[0] and "AsyncLLM" in errors[0] and "a process of its own" in errors[0]
        found = dict([first, *results])
        assert found[0]["token_ids"] == expected["token_ids"] and len(found[1]["token_ids"]) == 9


FORKED = """
import asyncio, os, sys
from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.distributed.ranks import EngineDeadError

if __name__ == "__main__":
    llm = {kind}({folder!r}, **{options!r})
    params = SamplingParams(0, 4, True)
    use = lambda: llm.generate([1, 2], params)
    if {kind} is AsyncLLM:
        use = lambda: asyncio.run(llm.generate([1, 2], params))
    expected = use()
    if {kind} is LLM:
        results = llm.generate_iter([[1, 2], [3]], [params, SamplingParams(0, 9, True)])
        next(results)
    if not (child := os.fork()):
        try:
            use()
        except EngineDeadError as error:
            print(error, flush=True)
        if {kind} is LLM:
            llm.clear()
            results.close()
        llm.exit()
        sys.exit(7)  # as a program ends: what is registered to run then is the parent's
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    if {kind} is LLM:
        assert [len(result["token_ids"]) for _, result in results] == [9]
    result = use()
    if {kind} is LLM:
        [result], [expected] = result, expected
    assert result["token_ids"] == expected["token_ids"]
    print("and goes on")
"""


@pytest.mark.parametrize(
    "kind, options", [slow("LLM", {"tensor_parallel_size": 2}), ("AsyncLLM", {})], ids=str
)
def test_a_fork_is_told_by_process_and_leaves_the_engine_as_it_was(folder, kind, options):
    program = FORKED.format(kind=kind, folder=folder, options=OPTIONS | options)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "this engine belongs to process" in done.stdout and "a fork of it" in done.stdout
    assert done.stdout.endswith("and goes on\n")
