"""Engines of several ranks, here processes that talk through gloo: the tokens of one rank, whatever happens a
clear end, and nothing that outlives it.

Faults come at random moments (seeded). Within seconds of each test's end no process, folder, port, thread or
shared memory is left of it.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from block_pool import check_pool
from cases import slow
from engines import Watch, tokens_of
from logit_settings import MIXED
from torch.distributed import FileStore

from nanovllm import LLM, SamplingParams
from nanovllm.distributed.group import Group
from nanovllm.distributed.ranks import EngineDeadError, Ranks
from nanovllm.engine.batch import Batch
from nanovllm.extensions.ranks.gloo_group import GlooGroup
from nanovllm.extensions.ranks.peer_group import PeerGroup
from nanovllm.extensions.ranks.reports import ReportingRanks
from nanovllm.kernels.layernorm import add_rms_norm
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, one_thread  # noqa: F401

GREEDY = SamplingParams(0, 12, True)
LONG = SamplingParams(0, 200, True)
PROMPTS = [[1, 2, 3], [*range(50)], [7] * 33]
OPTIONS = {**EXACT, "num_kvcache_blocks": 60}
ROOT = Path(__file__).parents[2]
LIMIT = 5  # seconds from a fault to the exception that tells of it, and from an engine's end to its ranks'
TOO_LONG = 60  # seconds for any test


# --- what must not be left ---


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder of our own for temporary files, by which the processes that we start are known as well."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        patch.setattr(tempfile, "tempdir", None)
        yield folder


def ranks_of(parent: int | None = None) -> set[int]:
    """The ids of the rank processes that this module, or one process, has started."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_rank = b"def end_with(parent, folder)" in (process / "cmdline").read_bytes()
            if is_rank and f"TMPDIR={tempfile.gettempdir()}\0".encode() in (process / "environ").read_bytes():
                stat = (process / "stat").read_text().rpartition(")")[2].split()
                found |= {int(process.name)} if parent in (None, int(stat[1])) else set()
    return found


def listening() -> set[str]:
    """The TCP sockets of this process that listen."""
    tables = [table.read_text() for table in Path("/proc/net").glob("tcp*")]
    sockets = [line.split() for table in tables for line in table.splitlines()]
    links = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.add(os.readlink(fd))
    return links & {f"socket:[{fields[9]}]" for fields in sockets if fields[3] == "0A"}


def waits_for_gloo(thread: threading.Thread) -> bool:
    """Now and then gloo waits for ever for a rank that was killed, in a thread that nothing can end."""
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code.co_name == "all_reduce"


def remains() -> dict[str, set]:
    return {
        "processes": ranks_of(),
        "folders": set(Path(tempfile.gettempdir()).glob("nanovllm-*")),
        # multiprocessing's semaphores go with its last process; Ray may run beside this
        "shared memory": {
            name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "plasma"))
        },
        "ports": listening(),
        "threads": {thread for thread in threading.enumerate() if "tqdm" not in thread.name},
    }


def wait_until(condition, seconds: float = LIMIT):
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return result


@pytest.fixture(autouse=True)
def nothing_left(place):
    """Of a test, and no test waits for ever."""

    def too_long(*_):
        raise TimeoutError(f"the test was not done after {TOO_LONG} s")

    before, left = remains(), {}
    handler = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(TOO_LONG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)

        def is_clean() -> bool:
            left.update((what, there - before[what]) for what, there in remains().items())
            return not any(left.values())

        clean = wait_until(is_clean)
        stuck = {thread for thread in left["threads"] if waits_for_gloo(thread)}
        if stuck and len(left["ports"]) <= len(stuck):  # each keeps its port, too
            left |= {"threads": left["threads"] - stuck, "ports": set()}
            clean = not any(left.values())
        for pid in left["processes"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert clean, {what: there for what, there in left.items() if there}


def moment(attempt: int, longest: float) -> float:
    return random.Random(11 * attempt + 1).uniform(0, longest)


@contextlib.contextmanager
def later(seconds: float, function, *args):
    """Do something after some seconds. The block must be over soon after it is done, but not before."""
    done = []
    timer = threading.Timer(seconds, lambda: (function(*args), done.append(time.monotonic())))
    timer.start()
    try:
        yield
    finally:
        end = time.monotonic()
        timer.cancel()
        timer.join()
    assert done and end - done[0] < LIMIT


# --- engines ---


def start(folder: str, size: int = 2, **options) -> LLM:
    return LLM(folder, **OPTIONS, **options, tensor_parallel_size=size)


def generate(llm: LLM) -> list[list[int]]:
    return tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def generate_forever(llm: LLM) -> None:
    while True:
        llm.generate(PROMPTS, LONG, use_tqdm=False)


@pytest.fixture(scope="module")
def model(place, tmp_path_factory):
    """A checkpoint, and what one rank makes of PROMPTS."""
    folder = str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=3))
    with start(folder, 1) as llm:
        return SimpleNamespace(folder=folder, tokens=generate(llm))


@pytest.fixture(scope="module")
def shared_engine(model):
    with start(model.folder, max_num_batched_tokens=40) as llm:
        generate(llm)
        yield llm


@pytest.fixture
def llm(shared_engine, model):
    """An engine of two ranks that must be empty and right after the test."""
    yield shared_engine
    assert shared_engine.is_finished()
    check_pool(shared_engine.scheduler.block_manager, [])
    assert generate(shared_engine) == model.tokens


def assert_ended(llm: LLM, cause: str, times: int = 2) -> None:
    """On every use the engine says why it ended, and its exit is harmless."""
    for use in (lambda: generate(llm), lambda: llm.add_request([1], GREEDY), llm.step) * times:
        with pytest.raises(RuntimeError, match=cause):
            use()
        llm.exit()


# --- the same tokens ---

CASES = {
    "qwen3, 2 ranks": dict(num_key_value_heads=2, vocab_size=321),
    "qwen3_moe, 2 ranks": dict(num_key_value_heads=1, vocab_size=322, mlp_only_layers=[0]),
    "qwen2, 4 ranks": dict(num_key_value_heads=2, vocab_size=323, tie_word_embeddings=True),
}


@pytest.mark.parametrize("case", [slow(case) if "4 ranks" in case else case for case in CASES])
@pytest.mark.usefixtures("no_forecast")
def test_any_number_of_ranks_gives_the_tokens_of_one(tmp_path, case):
    """
    Greedy and drawn, with prefix hits, preemptions and prompts in chunks. A rank has a KV head, all of them
    have the same, or two have; the KV cache of experts has 8 bits.
    """
    folder = str(make_checkpoint(tmp_path, case.split(",")[0], seed=4, **CASES[case]))
    pick = random.Random(0)
    shared = [pick.randrange(321) for _ in range(50)]
    prompts = [[pick.randrange(321) for _ in range(30)], [5], [*shared[:40], 1], shared, [*shared, 2, 3]]
    params = [SamplingParams(temperature, 14, True) for temperature in (0, 1.2, 1.2, 0, 1.2)]
    options = {**EXACT, "num_kvcache_blocks": 9, "max_num_batched_tokens": 40, "seed": 7}
    if "moe" in case:
        options["kv_cache_dtype"] = "int8"
    results = []
    for size in (1, 4 if "4 ranks" in case else 2):
        with LLM(folder, **options, tensor_parallel_size=size) as llm, Watch(llm) as seen:
            results.append(tokens_of(llm.generate(prompts, params, use_tqdm=False)))
            if size > 1:  # once more as GPUs are driven
                llm._seeds.seed(options["seed"])
                llm._overlap = True
                results.append(tokens_of(llm.generate(prompts, params, use_tqdm=False)))
            check_pool(llm.scheduler.block_manager, [])
        assert seen.preemptions and seen.chunks and any(seen.cached)
    assert results == [results[0]] * 3
    assert max(map(max, results[0])) > 300, "no token is of the last rank's part of the vocabulary"


def test_two_ranks_shape_the_choice_of_a_token_as_one_does(model):
    """Every kind of request in one batch: the choice needs all of the vocabulary, which is split."""
    params = [SamplingParams(**{"max_tokens": 14, "seed": i, **kind}) for i, kind in enumerate(MIXED)]
    params.append(SamplingParams(0, 2, True, prompt_logprobs=3))
    prompts = [[i, *range(20)] for i in range(len(params))]
    found, scores = [], []
    for size in (1, 2):
        with LLM(model.folder, **OPTIONS, tensor_parallel_size=size) as llm:
            found.append(llm.generate(prompts, params, use_tqdm=False))
            scores.append(llm.score(prompts[0], use_tqdm=False, from_token=9)[0]["token_logprobs"][9:])
    assert tokens_of(found[0]) == tokens_of(found[1])
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    for one, two in zip(*(results[-1]["prompt_logprobs"][1:] for results in found), strict=True):
        assert set(one) == set(two)
        assert [two[i].logprob for i in one] == pytest.approx([one[i].logprob for i in one], abs=1e-4)


def test_two_engines_started_at_the_same_moment_in_one_process_do_not_meet(model):
    gc.collect()
    num_files, num_ranks = len(os.listdir("/proc/self/fd")), len(ranks_of())
    with ThreadPoolExecutor(2) as pool:
        engines = list(pool.map(start, [model.folder] * 2))
        assert list(pool.map(generate, engines)) == [model.tokens] * 2
    assert len(ranks_of(os.getpid())) == num_ranks + 2
    first, second = engines
    first.exit()
    assert generate(second) == model.tokens
    first.exit()
    with pytest.raises(RuntimeError, match="exit"):
        generate(first)
    del engines, first, second  # one of them without exit()
    assert wait_until(lambda: len(ranks_of()) == num_ranks)
    gc.collect()
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_files)


def test_an_end_closes_every_file_and_leaves_none_to_the_garbage_collector(model, monkeypatch):
    gc.collect()
    gc.disable()
    try:
        num_files = len(os.listdir("/proc/self/fd"))
        llm = start(model.folder)
        llm.exit()
        assert wait_until(lambda: len(os.listdir("/proc/self/fd")) == num_files)
        popen, started = subprocess.Popen, []

        def failing_popen(*args, **options):
            if started:
                raise OSError("no more processes")
            started.append(popen(*args, **options))
            return started[0]

        monkeypatch.setattr(subprocess, "Popen", failing_popen)
        with pytest.raises(OSError, match="no more processes") as caught:
            start(model.folder, 4)
        assert wait_until(lambda: len(os.listdir("/proc/self/fd")) == num_files)
        assert caught and llm
    finally:
        gc.enable()


def test_memory_that_other_ranks_have_mapped_is_freed_when_they_have_ended():
    """And no kernel uses it any more, as the runner has ended before."""
    calls, group = mock.MagicMock(), PeerGroup()
    calls.backend.name.return_value = "nccl"
    group.backend, group.shared = calls.backend, calls.memory
    ranks = Ranks(2, lambda *_, **__: group)
    ranks._processes = [calls.process]
    ranks._worker = threading.Thread(target=ranks._work, args=(calls.runner, torch.get_num_threads()))
    ranks._worker.start()
    for _ in range(2):
        ranks.close()
    again = ["process.kill", "process.wait"]
    expected = ["runner.exit", *again, "backend.name", "backend.abort", "memory.close", *again]
    assert [name for name, *_ in calls.mock_calls if "on_device" not in name] == expected
    assert group.backend is None


def test_a_group_of_one_gives_back_what_it_gets():
    group = Group()
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    group.connect(torch.device("cpu"))
    assert group.gather("number", 5) == [5]
    assert group.all_reduce(x) is x
    assert group.best_token(x[:, 0], torch.tensor([4, 2, 3])).tolist() == [4, 2, 3]
    expected = add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    results = group.all_reduce_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert all(map(torch.equal, results, expected))


def test_gathered_values_reach_every_rank_in_the_order_of_the_ranks(tmp_path):
    groups = [Group(rank, 3, FileStore(str(tmp_path / "store"))) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for name in ("budget", "memory"):
            values = [random.Random(name).getrandbits(512) + rank for rank in range(3)]
            assert list(pool.map(Group.gather, groups, [name] * 3, values)) == [values] * 3


def test_of_equal_scores_every_rank_takes_the_lowest_token_id(tmp_path):
    scores = torch.tensor([[1.0, 5.0, -2.0, 0.0, -torch.inf], [1.0, 4.0, -1.0, 0.0, -torch.inf]])
    token_ids = torch.tensor([[7, 3, 6, 4, 5], [2, 8, 9, 11, 12]])
    groups = [Group(rank, 2, FileStore(str(tmp_path / "store"))) for rank in range(2)]

    def best_token(group: Group) -> list[int]:
        group.connect(torch.device("cpu"))
        found = group.best_token(scores[group.rank], token_ids[group.rank]).tolist()
        group.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(best_token, groups)) == [[2, 3, 9, 4, 5]] * 2


class Report:
    """The name of a method, whose reader writes into a file how many threads it has."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        program = f"open({str(self.file)!r}, 'w').write(str(__import__('torch').get_num_threads()))"
        return eval, (f"{program} and 'reset'",)


def test_the_ranks_share_the_threads_of_the_process(model, tmp_path, monkeypatch):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        with start(model.folder) as llm:
            monkeypatch.setattr(llm.model_runner, "reset", torch.get_num_threads)
            assert llm.ranks.call("reset") == 2
            llm.ranks._send([Report(tmp_path / "threads")])
            assert wait_until((tmp_path / "threads").exists)
            assert wait_until((tmp_path / "threads").read_text) == "2"
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(num_threads)


IMPOSSIBLE = [
    (3, "num_attention_heads", dict(num_attention_heads=4)),
    (8, "num_attention_heads", dict(num_attention_heads=4)),
    (4, "intermediate_size", dict(intermediate_size=98)),
    (4, "num_key_value_heads", dict(num_key_value_heads=6, num_attention_heads=12)),
    (4, "vocabulary", dict(vocab_size=9)),
    (4, "moe_intermediate_size", dict(moe_intermediate_size=34, architectures=["Qwen3MoeForCausalLM"])),
]


@pytest.mark.parametrize("size, name, changes", IMPOSSIBLE)
def test_an_impossible_split_is_refused_with_its_numbers_before_any_process(
    tmp_path, monkeypatch, size, name, changes
):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    edit_json(folder / "config.json", **changes)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    value = next(iter(changes.values()))
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={size}\b.*{name}.*\b{value}\b"):
        start(str(folder), size)


def test_a_step_sends_what_is_new_and_never_the_tokens_so_far(llm, monkeypatch):
    monkeypatch.setattr("nanovllm.engine.scheduler.MAX_PREFILLS_IN_A_ROW", 100)  # decode steps come last
    [commands] = llm.ranks._pipes
    send = commands.send_bytes

    def sizes_of_messages(length: int) -> dict[str, list[int]]:
        sizes = {"prefill": [], "decode": []}

        def watched_send(data: bytes) -> None:
            _, batch = pickle.loads(data)
            sizes["prefill" if batch.is_prefill else "decode"].append(len(data))
            send(data)

        with monkeypatch.context() as patch:
            patch.setattr(commands, "send_bytes", watched_send)
            prompts = [[length + i] * length for i in range(3)]
            llm.generate(prompts, SamplingParams(0, 60, True), use_tqdm=False)
        return sizes

    short, long = sizes_of_messages(32), sizes_of_messages(256)
    assert len(long["decode"]) == len(short["decode"]) == 59
    assert long["decode"] == short["decode"]
    assert max(short["decode"]) < 500
    tables = 2 * (256 / 16) * 8
    assert max(long["prefill"]) < 900 + 40 * 8 + tables, "40 tokens, at most 2 block tables"


# --- a rank's end ---


# A step that asks for what is not there.
IMPOSSIBLE_STEP = "run", Batch(1, 0, np.full((2, 1), 10**9, dtype=np.int32), {})


@pytest.mark.parametrize("attempt, size", [slow(0, 4), (1, 2)])
def test_a_failing_rank_ends_generate_with_its_number_and_the_cause(model, attempt, size):
    """Killed by a signal, or by an exception."""
    rank = size // 2
    llm = start(model.folder, size)
    assert generate(llm) == model.tokens, "a new engine works after another's failure"
    if attempt == 0:
        cause = f"rank {rank} was killed by SIGSEGV"
        fault = os.kill, llm.ranks._processes[rank - 1].pid, signal.SIGSEGV
    else:
        cause = f"rank {rank} failed: IndexError: .*1000000000"
        fault = llm.ranks._pipes[rank - 1].send, IMPOSSIBLE_STEP
    with later(moment(attempt, 0.5), *fault), pytest.raises(RuntimeError, match=cause):
        generate_forever(llm)
    assert_ended(llm, cause)


@pytest.mark.parametrize("way", ["killed", "exception"])
def test_without_reports_a_rank_that_ends_ends_generate_with_its_number(model, monkeypatch, capfd, way):
    monkeypatch.setattr("nanovllm.extensions.ranks.reports.ReportingRanks", Ranks)
    llm = start(model.folder)
    fault = (llm.ranks._processes[0].kill,) if way == "killed" else (llm.ranks._send, IMPOSSIBLE_STEP)
    with later(0.3, *fault), pytest.raises(RuntimeError, match="^rank 1 has ended; the engine has ended"):
        generate_forever(llm)
    assert_ended(llm, "rank 1 has ended")
    assert ("IndexError" in capfd.readouterr().err) == (way == "exception")


@pytest.mark.slow
def test_generate_ends_with_a_rank_whose_end_the_communication_does_not_notice(model):
    """Now and then gloo waits for ever for a rank that was killed."""
    llm = start(model.folder)
    group, calls, released = llm.ranks.group, iter(range(40)), threading.Event()
    allreduce = group.backend.allreduce

    def waiting_allreduce(*args):
        work = allreduce(*args)
        return SimpleNamespace(wait=released.wait) if next(calls, None) is None else work

    group.backend = backend = SimpleNamespace(allreduce=waiting_allreduce, name=group.backend.name)
    num_references = sys.getrefcount(backend)
    kill = os.kill, llm.ranks._processes[0].pid, signal.SIGKILL
    with later(0.5, *kill), pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
        generate_forever(llm)
    assert_ended(llm, "rank 1 was killed by SIGKILL", times=1)  # each exit waits for the step
    assert sys.getrefcount(backend) == num_references  # freeing it would wait as well
    released.set()
    assert wait_until(lambda: sys.getrefcount(backend) == num_references - 1)


def test_an_exception_on_rank_0_in_the_middle_of_a_step_ends_the_others(model, monkeypatch):
    """They wait for its part of the step, for which there is no way back."""
    llm = start(model.folder)
    group = llm.ranks.group
    calls, error = iter(range(7)), MemoryError("there is none left")

    def failing_best_token(*args):
        if next(calls, None) is None:
            raise error
        return Group.best_token(group, *args)

    monkeypatch.setattr(group, "best_token", failing_best_token)
    with later(0, lambda: None), pytest.raises(MemoryError, match="there is none left"):
        generate(llm)
    assert_ended(llm, "rank 0 failed: MemoryError: there is none left")


def test_of_several_failures_the_earliest_is_told():
    """It is the cause of the others, of which rank 0 may notice one as well."""
    ranks, pipes = ReportingRanks(3, mock.Mock()), [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    ranks._processes, ranks._pipes = [mock.Mock(), mock.Mock()], [reader for reader, _ in pipes]
    for (_, writer), when in zip(pipes, (9.0, 8.0), strict=True):
        writer.send((when, f"failed at {when}", "its traceback"))
    ranks._watch()
    ranks._fail("rank 0 failed")
    ranks.close()
    with pytest.raises(EngineDeadError, match="^rank 2 failed at 8.0; .*\nits traceback$"):
        ranks.check()


@pytest.mark.parametrize("attempt", range(2))
def test_a_rank_killed_while_the_engine_starts_is_named(model, attempt):
    others = ranks_of()

    def kill() -> None:
        [rank] = wait_until(lambda: ranks_of() - others)
        time.sleep(moment(attempt, 2.5))
        os.kill(rank, signal.SIGKILL)

    with later(0, kill), pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
        generate_forever(start(model.folder))


def test_a_rank_that_is_killed_before_it_tells_its_address_leaves_no_thread_and_no_port(tmp_path):
    store = FileStore(str(tmp_path / "store"))
    store.set("ready.1", "0")
    deadline = time.monotonic() + 0.5

    def check() -> None:
        if time.monotonic() > deadline:
            raise RuntimeError("rank 1 was killed")

    group = GlooGroup(0, 2, store, check=check)
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        group.connect(torch.device("cpu"))
    shutil.rmtree(tmp_path)  # as an engine's end does; `nothing_left` looks for threads and ports


def test_an_engine_that_cannot_start_says_why_as_with_one_rank(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    edit_json(folder / "config.json", num_hidden_layers=3, layer_types=None)  # one layer has no tensors
    with pytest.raises(ValueError, match="model.layers.2"):
        start(str(folder))
    edit_json(folder / "config.json", num_hidden_layers=2)
    edit_json(folder / "generation_config.json", eos_token_id="none")  # found when all ranks are there
    others = ranks_of()
    with pytest.raises(ValueError, match="eos_token_id") as caught:
        start(str(folder))
    assert wait_until(lambda: ranks_of() == others), "before the exception is forgotten"
    assert caught


def test_a_start_that_fails_on_rank_0_alone_does_not_wait_for_the_others(model, monkeypatch, place):
    """They wait for it, as ranks that are ready do."""
    others, times = set(place.glob("nanovllm-*")), []

    def failing_load(*_):
        [folder] = set(place.glob("nanovllm-*")) - others
        wait_until(lambda: FileStore(str(folder / "store")).check(["ready.1"]), TOO_LONG)
        times.append(time.monotonic())
        raise MemoryError("there is none left")

    monkeypatch.setattr("nanovllm.engine.model_runner.load_model", failing_load)
    with pytest.raises(MemoryError, match="there is none left"):
        start(model.folder)
    assert time.monotonic() - times[0] < LIMIT


# --- Ctrl-C ---


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize("attempt", range(6))
def test_ctrl_c_leaves_the_engine_empty_and_right(llm, monkeypatch, attempt):
    monkeypatch.setattr(llm, "_overlap", attempt % 2 == 1)
    with later(moment(attempt, 0.4), interrupt), pytest.raises(KeyboardInterrupt):
        generate_forever(llm)
    monkeypatch.undo()


@pytest.mark.parametrize("attempt", range(2))
def test_ctrl_c_while_the_engine_starts_leaves_nothing(model, attempt):
    with later(moment(attempt, 2.5), interrupt), pytest.raises(KeyboardInterrupt):
        generate_forever(start(model.folder))


# --- rank 0's end ---


def serve_forever(folder: str, report, is_idle: bool) -> None:
    """What a process of the next tests does, which reports its first tokens."""
    llm = start(folder)
    report.send(generate(llm))
    if is_idle:
        time.sleep(TOO_LONG)
    generate_forever(llm)


@pytest.fixture
def start_process(model):
    """Starts a process and gives it together with where it reports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_parallel"])
    processes = []

    def start_process(is_idle: bool = False):
        reports, report = context.Pipe()
        processes.append(context.Process(target=serve_forever, args=(model.folder, report, is_idle)))
        processes[-1].start()
        return processes[-1], reports

    yield start_process
    for process in processes:
        process.kill()
        process.join()


def test_ranks_end_with_a_rank_0_that_is_killed_while_it_starts(start_process):
    process, _ = start_process()
    assert wait_until(lambda: ranks_of(process.pid), TOO_LONG)
    time.sleep(moment(0, 2.5))
    assert ranks_of(process.pid)
    process.kill()


@pytest.mark.slow
def test_engines_of_two_processes_do_not_meet_and_their_ranks_end_with_them(model, start_process):
    (idle, first), (busy, second) = start_process(is_idle=True), start_process()
    assert first.recv() == second.recv() == model.tokens
    time.sleep(moment(0, 0.5))
    assert ranks_of(idle.pid) and ranks_of(busy.pid)
    busy.kill()
    idle.kill()


PROGRAM = """
import os, signal, sys, threading, time
from nanovllm import LLM, SamplingParams
llm = LLM({folder!r}, **{options!r}, tensor_parallel_size=2)
def generate(count):
    params = SamplingParams(0, count, True)
    results = llm.generate({prompts!r}, params, use_tqdm=False)
    print([result["token_ids"] for result in results], flush=True)
generate(12)
"""
ENDINGS = {
    "a thread goes on": "threading.Thread(target=lambda: (time.sleep(0.3), generate(12))).start()",
    "Ctrl-C": "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start(); generate(400)",
}


@pytest.mark.parametrize(
    "given_as, ending, status, times, complaint",
    [
        ("file", "a thread goes on", 0, 2, ""),
        slow("-c", "Ctrl-C", -signal.SIGINT, 1, r"Traceback(?!.*Traceback).*KeyboardInterrupt\s*"),
    ],
)
def test_a_program_without_a_main_guard_works_and_ends_with_all_its_ranks(
    model, tmp_path, given_as, ending, status, times, complaint
):
    """
    It never calls exit(), lies beside files that are no concern of the engine's, and given as -c it leaves
    the folder that it has imported the engine from.
    """
    program = PROGRAM.format(folder=model.folder, options=OPTIONS, prompts=PROMPTS) + ENDINGS[ending]
    file = tmp_path / "program.py"
    file.write_text(program)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment, folder = dict(os.environ), elsewhere
    if given_as == "file":
        (elsewhere / "json.py").write_text("raise SystemExit('not the module of that name')")
    else:
        del environment["PYTHONPATH"]
        program, folder = program.replace("llm =", f"os.chdir({str(elsewhere)!r}); llm =", 1), ROOT
    result = subprocess.run(
        [sys.executable, *([file] if given_as == "file" else ["-c", program])],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TOO_LONG,
    )
    assert result.returncode == status, result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == [model.tokens] * times
    assert re.fullmatch(complaint, result.stderr, re.DOTALL), result.stderr
