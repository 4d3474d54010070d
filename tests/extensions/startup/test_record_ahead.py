"""Which CUDA graphs are recorded before they are needed, and that steps do not notice."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import recorded_graphs
import torch
from tqdm import tqdm

from nanovllm import LLM, SamplingParams
from nanovllm.engine.interfaces import notify
from nanovllm.extensions.startup import record_ahead
from nanovllm.extensions.startup.record_ahead import RecordAhead
from tiny_checkpoints import EXACT, make_checkpoint

SIZES = [1, 2, 4, 8, 16]


class Later:
    """In place of a thread: works when somebody waits for it."""

    pending: list = []
    ident = None

    def __init__(self, target, args):
        self.work = lambda: target(*args)

    def start(self):
        self.ident = 1
        self.pending.append(self.work)


class Idle(threading.Event):
    def wait(self, timeout=None):
        while Later.pending:
            Later.pending.pop()()
        assert self.is_set()


class Runner:
    """Its kinds of steps are recorded in turn."""

    graphs, graph_sizes = object(), SIZES

    def __init__(self):
        self.decoded = {}
        self.on_device = threading.Lock  # any context

    def capture_cudagraph(self, kind):
        self.decoded[kind] = None


@pytest.fixture
def later(monkeypatch):
    monkeypatch.setattr(Later, "pending", [])
    monkeypatch.setattr(record_ahead, "Thread", Later)
    monkeypatch.setattr(record_ahead, "Event", Idle)


@pytest.fixture
def observer(later):
    observer = RecordAhead()
    observer.started(SimpleNamespace(model_runner=Runner(), is_generating=True, in_flight=[]))
    return observer


def launch(observer, count, is_prefill=False, plan_key=False, wanted=0) -> list:
    """A step of so many sequences, which records what is missing. -> the kinds there are."""
    batch = SimpleNamespace(num_sequences=count, is_prefill=is_prefill, plan_key=plan_key, wanted=wanted)
    observer.launching(SimpleNamespace(batch=batch))
    runner = observer._engine.model_runner
    kind = next(size for size in SIZES if size >= count), plan_key, wanted
    if not is_prefill and kind not in runner.decoded:
        runner.capture_cudagraph(kind)
    return [*runner.decoded]


def begin(observer) -> list:
    """Until 8 is being recorded, beside a step of 15 sequences."""
    launch(observer, 16)
    return launch(observer, 15)


def test_smaller_graphs_of_the_same_kind_are_recorded_one_at_a_time_largest_first(observer):
    assert launch(observer, 8, plan_key=True, wanted=3) == [(8, True, 3)]
    for size in (4, 2, 1):
        before = launch(observer, 7, plan_key=True, wanted=3)
        assert launch(observer, 6, plan_key=True, wanted=3) == before and len(Later.pending) == 1
        assert (size, True, 3) not in before
        observer.wait()
        assert (size, True, 3) in observer._engine.model_runner.decoded
    launch(observer, 5, plan_key=True, wanted=3)
    assert not Later.pending  # nothing is missing


def test_nothing_is_recorded_while_all_sequences_go_on_or_more_come(observer):
    for count in (5, 8, 8, 16, 16):
        launch(observer, count)
    launch(observer, 3, is_prefill=True)
    launch(observer, 16)
    assert not Later.pending
    launch(observer, 15)
    assert Later.pending
    observer.stop()
    launch(observer, 1, is_prefill=True)  # of the next call
    launch(observer, 14)
    assert not Later.pending


def test_a_step_that_needs_a_missing_graph_waits_for_what_is_recorded(observer):
    begin(observer)
    assert launch(observer, 8) == [(16, False, 0), (8, False, 0)]  # once
    launch(observer, 7)
    assert launch(observer, 1) == [(16, False, 0), (8, False, 0), (4, False, 0), (1, False, 0)]


def test_a_prefill_waits_and_records_nothing(observer):
    launch(observer, 1)
    begin(observer)
    assert launch(observer, 16, is_prefill=True)[1:] == [(16, False, 0), (8, False, 0)]
    assert not Later.pending


def test_nothing_is_recorded_any_more_when_a_call_ends(observer):
    for end in (lambda: observer.after_step(None), observer.cleared, observer.stop):
        observer._engine.model_runner.decoded.clear()
        begin(observer)
        observer._engine.in_flight = [None]
        observer.after_step(None)
        assert Later.pending
        observer._engine.in_flight = []
        end()
        assert not Later.pending


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "steps"])
def test_nothing_is_recorded_ahead_without_graphs_or_when_somebody_might_wait_for_the_device(
    observer, is_eager
):
    begin(observer)
    if is_eager:
        observer._engine.model_runner.graphs = None
    else:
        observer._engine.is_generating = False
    assert (8, False, 0) in launch(observer, 14)  # waits for what has begun
    launch(observer, 13)
    assert not Later.pending


@pytest.mark.parametrize(
    "facts, count",
    [
        ({}, 3),
        ({"hf_config": SimpleNamespace(architectures=[])}, 2),
        ({"device": "cpu"}, 1),
        ({"tensor_parallel_size": 2}, 1),
        ({"extensions": ["mine"]}, 1),
    ],
    ids=str,
)
def test_it_is_done_on_one_gpu_and_without_somebodys_own_parts(facts, count):
    usual = dict(device="cuda", tensor_parallel_size=1, extensions=None)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]), **usual)
    vars(config).update(facts)
    kinds = [type(each).__name__ for each in record_ahead.observers(config, None)]
    assert kinds == ["CompileAhead", "RecordAhead", "ShortPrefills"][:count]


def test_after_an_error_steps_record_what_they_need(observer):
    runner = observer._engine.model_runner

    def fail(kind):
        raise RuntimeError("no memory")

    launch(observer, 16)
    runner.capture_cudagraph = fail
    launch(observer, 15)
    observer.wait()
    del runner.capture_cudagraph
    launch(observer, 14)
    assert not Later.pending
    assert launch(observer, 8) == [(16, False, 0), (8, False, 0)]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_where_no_thread_can_be_started_steps_record_what_they_need(observer, monkeypatch, error):
    def start(self):
        self.pending.append(self.work)  # may run all the same, later
        raise error

    monkeypatch.setattr(Later, "start", start)
    try:
        begin(observer)
    except KeyboardInterrupt:
        assert not isinstance(error, Exception)
    observer.wait()
    assert [*observer._engine.model_runner.decoded] == [(16, False, 0)]
    assert observer._has_failed == isinstance(error, Exception)


def test_an_engine_says_that_it_generates_only_until_the_call_ends_and_with_its_own_bar(tmp_path):
    seen = []
    with LLM(str(make_checkpoint(tmp_path)), **EXACT, num_kvcache_blocks=20) as llm:
        llm.scheduler.schedule = note_before(llm.scheduler.schedule, lambda: seen.append(llm.is_generating))
        params = SamplingParams(max_tokens=1)
        llm.generate([[1]], params, use_tqdm=False)
        llm.generate([[1]], params, use_tqdm=tqdm)
        [*llm.generate_iter([[1]], params)]
        assert seen[0] and not any(seen[1:]) and not llm.is_generating
        llm.scheduler.schedule = note_before(llm.scheduler.schedule, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1]], params, use_tqdm=False)
        assert not llm.is_generating


def note_before(function, note):
    def noted(*args):
        note()
        return function(*args)

    return noted


def make_prompts(count):
    prompts = [[(i * j) % 250 for j in range(30)] for i in range(1, count + 1)]
    params = [
        SamplingParams(
            temperature=0.8, seed=i, max_tokens=4 + i, ignore_eos=True, top_p=1 - 0.1 * (i % 3 == 0)
        )
        for i in range(count)
    ]
    return prompts, params


@pytest.mark.usefixtures("later")
def test_recorded_ahead_they_compute_the_same(tmp_path, monkeypatch):
    """As on a GPU, but recorded on a CPU, and in memory that every other recording has overwritten."""
    folder = str(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1))
    prompts, params = make_prompts(11)
    found, needed = [], []
    for is_ahead in (False, True):
        options = EXACT | dict(max_num_batched_tokens=128, max_num_seqs=16, num_kvcache_blocks=100)
        with monkeypatch.context() as patch, LLM(folder, **options) as llm:
            recorded_graphs.install(llm, patch)
            if is_ahead:
                observer = RecordAhead()
                observer.started(llm)
                patch.setattr(llm, "tell", partial(notify, [observer]))
            runner, forward = llm.model_runner, llm.model_runner.forward

            def note(batch, runner=runner, forward=forward):
                before = len(runner.decoded)
                draw = forward(batch)
                needed[-1] += len(runner.decoded) - before
                return draw

            patch.setattr(runner, "forward", note)
            needed.append(0)
            found.append([each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]
    assert needed[1] < needed[0]


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(make_checkpoint(folder, "qwen3", vocab_size=257, max_position_embeddings=4096))


@pytest.mark.gpu
def test_on_a_gpu_they_are_there_when_they_are_needed_and_compute_the_same(on_gpu, monkeypatch):
    prompts, _ = make_prompts(60)
    params = [SamplingParams(temperature=0, max_tokens=20 + 5 * i, ignore_eos=True) for i in range(60)]
    launching, found, by_threads = RecordAhead.launching, [], []
    for is_ahead in (False, True):
        monkeypatch.setattr(RecordAhead, "launching", launching if is_ahead else lambda *_: None)
        with LLM(on_gpu, max_num_seqs=64, num_kvcache_blocks=200) as llm:
            runner, capture = llm.model_runner, llm.model_runner.capture_cudagraph

            def note(kind, capture=capture):
                by_threads[-1] += threading.current_thread() is not threading.main_thread()
                capture(kind)

            runner.capture_cudagraph = note
            by_threads.append(0)
            found.append([each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)])
            for count in (3, 6):
                runner.decoded.clear()
                short = [SamplingParams(max_tokens=3 + i // 10, ignore_eos=True) for i in range(10 * count)]
                llm.generate(prompts[: 10 * count], short, use_tqdm=False)
                torch.cuda.synchronize()  # nothing is recorded any more
    assert found[0] == found[1]
    assert by_threads[0] == 0 and by_threads[1] >= 4


@pytest.mark.gpu
@pytest.mark.parametrize("end", ["exit", "error"])
def test_on_a_gpu_an_engine_may_end_or_fail_while_a_graph_is_recorded(on_gpu, monkeypatch, end):
    prompts, params = make_prompts(12)
    with LLM(on_gpu, max_num_seqs=16, num_kvcache_blocks=200) as llm:
        expected = [each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(on_gpu, max_num_seqs=16, num_kvcache_blocks=200) as llm:
        runner, is_recording = llm.model_runner, threading.Event()
        decode_step = runner.decode_step

        def slow(kind):
            draw = decode_step(kind)
            if threading.current_thread() is not threading.main_thread():
                is_recording.set()
                time.sleep(0.3)
            return draw

        runner.decode_step, llm.is_generating = slow, True
        for request in zip(prompts, params, strict=True):
            llm.add_request(*request)
        while not is_recording.is_set():
            llm.step()
        if end == "exit":
            return
        with monkeypatch.context() as patch:
            patch.setattr(llm.scheduler, "postprocess", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.step()
        llm.clear()
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [each["token_ids"] for each in found] == expected
