"""Which CUDA graphs are recorded while the GPU computes prompts."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import recorded_graphs

from nanovllm import LLM, SamplingParams
from nanovllm.engine.interfaces import notify
from nanovllm.extensions.startup import capture_ahead
from nanovllm.extensions.startup.capture_ahead import CaptureAhead
from tiny_checkpoints import EXACT, make_checkpoint


class Clock:
    """What recording takes, and time."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds = 100.0, seconds
        monkeypatch.setattr(capture_ahead, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def capture(self, name, kind):
        assert name == "capture_cudagraph"
        self.now += self.seconds
        self.kinds[kind] = None


def make_engine(clock, unfinished=20, **step):
    """In the middle of two steps: the second began to be launched when the first one's time began."""
    clock.kinds = {}
    runner = SimpleNamespace(graphs=object(), decoded=clock.kinds, graph_sizes=[1, 2, 4, 8, 16, 24, 32])
    runner.call = clock.capture
    facts = dict(is_prefill=True, wanted=0, max_tokens=9) | step
    sequences = [SimpleNamespace(sampling_params=SimpleNamespace(max_tokens=facts["max_tokens"]))]
    batch = SimpleNamespace(is_prefill=facts["is_prefill"], wanted=facts["wanted"])
    running = SimpleNamespace(batch=batch, sequences=sequences, started=100.0)
    return SimpleNamespace(in_flight=[running], unfinished=range(unfinished), model_runner=runner)


def after_step(observer, engine, clock, seconds):
    """A step ends for which the host has waited so long, and the one behind it was launched before that."""
    engine.in_flight[-1].started = clock.now
    clock.now += seconds
    before = len(clock.kinds)
    observer.after_step(None)
    return [size for size, *_ in [*clock.kinds][before:]]


def test_as_many_are_recorded_as_there_is_time_for(monkeypatch):
    clock = Clock(monkeypatch, seconds=0.02)
    observer, engine = CaptureAhead(lambda: True), make_engine(clock)
    observer.started(engine)
    assert after_step(observer, engine, clock, 0.029) == []  # 0.03 is the first guess
    assert after_step(observer, engine, clock, 0.05) == [24, 16]  # the smallest for 20 sequences, and smaller
    # Recording took 0.04 s of the next step, so that the host waits less for it.
    assert after_step(observer, engine, clock, 0.01) == [8, 4]
    assert after_step(observer, engine, clock, 0.5) == [2, 1]
    assert after_step(observer, engine, clock, 0.5) == []
    assert [*clock.kinds] == [(size, False, 0) for size in (24, 16, 8, 4, 2, 1)]


def test_more_sequences_than_run_at_once_need_the_largest(monkeypatch):
    clock = Clock(monkeypatch, seconds=0.02)
    observer, engine = CaptureAhead(lambda: True), make_engine(clock, unfinished=1000)
    observer.started(engine)
    assert after_step(observer, engine, clock, 0.03) == [32]


@pytest.mark.parametrize(
    "step",
    [{"is_prefill": False}, {"wanted": 1}, {"max_tokens": 1}],
    ids=["decode", "processors", "one token"],
)
def test_steps_that_no_plain_decode_step_follows_record_none(monkeypatch, step):
    clock = Clock(monkeypatch, seconds=0.02)
    observer, engine = CaptureAhead(lambda: True), make_engine(clock, **step)
    observer.started(engine)
    assert after_step(observer, engine, clock, 1.0) == []


def test_nothing_is_recorded_without_graphs_kernels_or_a_step_in_flight(monkeypatch):
    clock = Clock(monkeypatch, seconds=0.02)
    engine = make_engine(clock)
    waiting = CaptureAhead(lambda: False)
    waiting.started(engine)
    assert after_step(waiting, engine, clock, 1.0) == []
    observer = CaptureAhead(lambda: True)
    observer.started(engine)
    engine.model_runner.graphs = None
    assert after_step(observer, engine, clock, 1.0) == []
    engine.in_flight = []
    observer.after_step(None)
    assert not clock.kinds


def test_engines_without_graphs_or_with_other_kinds_of_steps_do_not_record_ahead():
    for device, exact in (("cpu", False), ("cuda", True), ("cuda", False)):
        found = capture_ahead.observers(SimpleNamespace(device=device, exact=exact), None)
        assert [type(each) for each in found[1:]] == [CaptureAhead] * (device == "cuda" and not exact)


def test_recorded_ahead_they_compute_the_same(tmp_path, monkeypatch):
    """As on a GPU, but recorded on a CPU, and in memory that every other recording has overwritten."""
    folder = str(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1))
    prompts = [[(i * j) % 250 for j in range(30)] for i in range(1, 12)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=4 + i, ignore_eos=True) for i in range(11)]
    options = EXACT | dict(max_num_batched_tokens=48, max_num_seqs=16, num_kvcache_blocks=100)
    found, recorded = [], []
    for is_ahead in (False, True):
        with monkeypatch.context() as patch, LLM(folder, **options) as llm:
            graphs = recorded_graphs.install(llm, patch)
            if is_ahead:
                observer = CaptureAhead(lambda: True)
                observer.started(llm)
                observer._each = 0.0
                patch.setattr(llm, "notify", partial(notify, (*llm.parts.observers, observer)))
            forward = llm.model_runner.forward

            def note(batch, forward=forward, graphs=graphs):
                recorded[-1].append((batch.is_prefill, len(graphs.graphs)))
                return forward(batch)

            patch.setattr(llm.model_runner, "forward", note)
            recorded.append([])
            found.append([each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]
    before_decode = [next(count for is_prefill, count in each if not is_prefill) for each in recorded]
    assert before_decode[0] == 0 and before_decode[1] >= 4


@pytest.mark.gpu
def test_graphs_are_there_before_the_first_decode_step(tmp_path, monkeypatch):
    """And the tokens are those of an engine that records when a step needs it."""
    folder = make_checkpoint(tmp_path, "qwen3", vocab_size=257, max_position_embeddings=4096)
    prompts = [[i % 250 + 1] * 1500 for i in range(30)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found, recorded, missing = [], [], CaptureAhead._missing
    for is_ahead in (False, True):  # when kernels are compiled
        monkeypatch.setattr(CaptureAhead, "_missing", missing if is_ahead else lambda *_: ())
        with LLM(str(folder), max_num_batched_tokens=4096, max_model_len=2048, max_num_seqs=32) as llm:
            runner = llm.model_runner
            decode, ahead = runner.forward, []

            def forward(batch, decode=decode, ahead=ahead, runner=runner):
                if batch.is_prefill:
                    time.sleep(0.05)  # as if it took long
                elif not ahead:
                    ahead.append(len(runner.decoded))
                return decode(batch)

            runner.forward = forward
            found.append([each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)])
            recorded += ahead
    assert found[0] == found[1]
    assert recorded[0] == 0 and recorded[1] > 1
