"""nanovllm.batch over several engines: what their deaths cost, which must be no answer and no second one."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from batch_files import ENGINE, ROOT, read_answers, run_batch, write_lines

from nanovllm import LLM, SamplingParams
from nanovllm.distributed.ranks import EngineDeadError
from nanovllm.extensions.batch.files import read_lines
from nanovllm.extensions.batch.lines import Answer, to_json
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

ray = pytest.importorskip("ray", reason="several engines need Ray, the `ray` extra")
batch_ray = pytest.importorskip("nanovllm.extensions.batch.ray")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=257)


class FakeRay:
    """
    Ray as the driver sees it. The call that is done next is a random one of those under way; the answers are
    empty. A line with "kill" in it ends the engine that has it under way, and whatever else it has.
    """

    exceptions = ray.exceptions

    def __init__(self, seed: int = 0, num_random_deaths: int = 0, failed_starts: Sequence[Exception] = ()):
        self.rng = random.Random(seed)
        self.num_random_deaths, self.failed_starts = num_random_deaths, iter(failed_starts)
        self.num_actors = self.num_deaths = self.num_answered = 0
        self.under_way: dict[object, set[FakeCall]] = {}  # of each actor that is alive

    def init(self, **_) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def remote(self, _: type):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._make_actor))

    def _make_actor(self, *_):
        def begin(span: Sequence = ()) -> FakeCall:
            call = FakeCall(actor, [*span])
            self.under_way.get(actor, set()).add(call)
            return call

        begins = SimpleNamespace(remote=begin)
        actor = FakeActor(start=begins, answer=begins)
        self.under_way[actor] = set()
        self.num_actors += 1
        return actor

    def kill(self, actor) -> None:
        self.under_way.pop(actor, None)

    def wait(self, calls: list) -> tuple[list, list]:
        done = self.rng.choice(calls)
        return [done], [call for call in calls if call is not done]

    def get(self, call) -> list[Answer]:
        if not call.lines and (error := next(self.failed_starts, None)) is not None:
            raise ray.exceptions.RayTaskError("start", "its trace", error)
        self._maybe_die(call.actor)
        if call.actor not in self.under_way:
            if self.rng.random() < 0.5:
                raise ray.exceptions.ActorDiedError()
            raise ray.exceptions.RayTaskError("answer", "its trace", EngineDeadError("rank 1 has died"))
        self.under_way[call.actor].remove(call)
        self.num_answered += len(call.lines)
        return [Answer(line, to_json({"line": line}), 0, False) for line, _ in call.lines]

    def _maybe_die(self, actor) -> None:
        lines = [line for call in self.under_way.get(actor, ()) for line in call.lines]
        is_unlucky = len(lines) > 1 and self.num_random_deaths > 0 and self.rng.random() < 0.1
        if is_unlucky or any(b"kill" in text for _, text in lines):
            self.num_random_deaths -= is_unlucky
            self.num_deaths += 1
            del self.under_way[actor]


class FakeActor(SimpleNamespace):
    __hash__ = object.__hash__


class FakeCall:
    def __init__(self, actor: FakeActor, lines: list[tuple[int, bytes]]):
        self.actor, self.lines = actor, lines


@pytest.fixture
def run_with(tmp_path, monkeypatch, capsys):
    """Runs a batch with a FakeRay; returns the answers and what was said on stderr."""

    def run(cluster: FakeRay, lines: list, *options, done: Iterable[int] = ()) -> tuple[list[dict], str]:
        monkeypatch.setattr(batch_ray, "ray", cluster)
        output = write_lines(tmp_path / "out.jsonl", [{"line": line} for line in done])
        source = write_lines(tmp_path / "in.jsonl", lines)
        run_batch(Path("m"), source, output, "--resume", *options)
        return read_answers(output), capsys.readouterr().err

    return run


def test_only_lines_that_end_engines_alone_are_answered_with_an_error(run_with):
    rng, saw_one_by_one = random.Random(0), False
    for seed in range(60):
        num_lines = rng.choice([1, 7, 100, 700])
        killers = set(rng.sample(range(1, num_lines + 1), rng.randrange(min(num_lines, 3) + 1)))
        lines = [{"prompt": "kill" if i in killers else "x", "custom_id": i} for i in range(1, num_lines + 1)]
        done = rng.sample(range(1, num_lines + 1), num_lines // 3) if seed % 3 == 0 else []
        options = ["--data-parallel", rng.choice([1, 2, 5]), "--max-num-seqs", rng.choice([4, 16, 512])]
        cluster = FakeRay(seed, num_random_deaths=1)
        answers, said = run_with(cluster, lines, *options, done=done)
        assert [answer["line"] for answer in answers] == list(range(1, num_lines + 1))
        blamed = [answer for answer in answers if answer.get("error")]
        assert {answer["custom_id"] for answer in blamed} == killers - set(done)
        assert all(
            "every engine that computed it has died: " in answer["error"]["message"] for answer in blamed
        )
        # Two in company, then the span alone, then the line.
        assert cluster.num_deaths <= 4 * len(blamed) + 1
        assert said.count("an engine has died") == cluster.num_deaths
        saw_one_by_one |= "lines from" in said
    assert saw_one_by_one


@pytest.mark.parametrize("num_starts", [0, 3])
def test_engines_that_die_without_an_answer_end_the_run(run_with, num_starts):
    """The first ones while they start, the others with every line that they get."""
    cluster = FakeRay(failed_starts=[RuntimeError("out of memory")] * num_starts)
    with pytest.raises(RuntimeError, match="8 engines in a row have died without an answer, the last: "):
        run_with(cluster, [{"prompt": "kill"}] * 1000, "--data-parallel", 1)
    assert cluster.num_actors == 8 == num_starts + cluster.num_deaths


def test_an_engine_that_cannot_start_is_tried_again_until_one_can(run_with):
    cluster = FakeRay(failed_starts=[MemoryError(), EngineDeadError("rank 1 has died")] * 2)
    answers, said = run_with(cluster, [{"prompt": "x"}] * 9, "--data-parallel", 1)
    assert len(answers) == 9 and cluster.num_actors == 5
    assert said.count("an engine has died with 0 lines") == 4 and "place: rank 1 has died\n" in said


@pytest.mark.parametrize("error", [ValueError("max_model_len is too large"), OSError("no such file")])
def test_what_another_engine_would_not_mend_ends_the_run_at_once(run_with, error):
    cluster = FakeRay(failed_starts=[error])
    with pytest.raises(type(error), match=f"^{error}$"):
        run_with(cluster, [{"prompt": "x"}] * 9, "--data-parallel", 1)
    assert cluster.num_actors == 1


@pytest.mark.parametrize("count, ranks, fits", [(2, 2, True), (1, 4, True), (5, 1, False), (2, 3, False)])
def test_all_ranks_of_all_engines_need_gpus(monkeypatch, count, ranks, fits):
    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 9.0, "GPU": 4.0})
    monkeypatch.setattr(batch_ray, "ray", cluster)
    args = SimpleNamespace(data_parallel=count, engine={"tensor_parallel_size": ranks})
    if fits:
        assert batch_ray._resources(args) == {"num_cpus": 1, "num_gpus": ranks}
        return
    with pytest.raises(ValueError, match=f"needs {count * ranks} GPUs, but the Ray cluster has 4"):
        batch_ray._resources(args)


def test_spans_are_read_as_engines_have_room(run_with, monkeypatch):
    cluster = FakeRay()

    def counted(*args) -> Iterator[tuple[int, bytes]]:
        for num_read, line in enumerate(read_lines(*args), 1):
            # Two engines' room, each passed by a span.
            assert num_read <= cluster.num_answered + 2 * (16 + 128)
            yield line

    monkeypatch.setattr(batch_ray, "read_lines", counted)
    answers, _ = run_with(cluster, [{"prompt": "x"}] * 10_000, "--data-parallel", 2, "--max-num-seqs", 4)
    assert len(answers) == cluster.num_answered == 10_000


def test_spans_keep_neighbours_together(run_with, monkeypatch):
    """Prompts with a common beginning that stand together meet in one engine, and its prefix cache."""
    lines = [{"prompt": f"group {i // 20}"} for i in range(640)]
    cluster = FakeRay()
    get, groups = cluster.get, []

    def noted(call: FakeCall) -> list[Answer]:
        groups.append({text for _, text in call.lines})
        return get(call)

    monkeypatch.setattr(cluster, "get", noted)
    run_with(cluster, lines, "--data-parallel", 1)
    assert sum(len(group) == 1 for group in groups) == len(groups) - 1 == 32  # and a start, which has none


@pytest.mark.slow
def test_what_one_request_raises_is_its_answer_and_what_ends_its_engine_is_tried_again(
    tmp_path, checkpoint, monkeypatch, capsys
):
    class FaultyEngine(batch_ray.Engine):
        async def start(self) -> None:
            await super().start()
            generate = self.llm.generate

            async def fail(token_ids, params):
                if token_ids == [2]:
                    raise RuntimeError("out of memory")
                if token_ids != [3]:
                    return await generate(token_ids, params)
                with open(tmp_path / "deaths", "ab", 0) as deaths:
                    deaths.write(b"x")
                if os.path.getsize(tmp_path / "deaths") % 2:
                    os._exit(1)
                raise EngineDeadError("rank 1 has died")

            self.llm.generate = fail

    monkeypatch.setattr(batch_ray, "Engine", FaultyEngine)
    prompts = {10: [3], 20: [2]}
    lines = [{"prompt": prompts.get(i, [1]), "custom_id": i} for i in range(1, 41)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run_batch(checkpoint, source, output, "--data-parallel", 2)
    answers = read_answers(output)
    assert [answer["custom_id"] for answer in answers] == list(range(1, 41))
    errors = {answer["line"]: answer["error"]["message"] for answer in answers if answer.get("error")}
    assert errors.keys() == {10, 20} and errors[20] == "line 20: RuntimeError: out of memory"
    assert errors[10].startswith(
        "line 10: every engine that computed it has died: The actor is dead because its worker "
    )
    assert capsys.readouterr().err.count("an engine has died") == len((tmp_path / "deaths").read_bytes()) == 3


def processes_of(name: bytes, mark: str) -> list[int]:
    """Those of this name that have inherited a variable from our command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = (folder / "cmdline").read_bytes().startswith(name)
            if named and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_with_an_actor_killed_every_line_is_answered_exactly_once(tmp_path, checkpoint):
    num_lines, output = 1200, tmp_path / "out.jsonl"
    lines = [{"prompt": f"question {i}", "temperature": 0, "max_tokens": 24} for i in range(num_lines)]
    source = write_lines(tmp_path / "in.jsonl", [*lines[:-1], "no JSON"])
    output.write_bytes(b'{"line": 7}\n{"line"')
    files = ["--model", checkpoint, "--input", source, "--output", output, "--resume", "--data-parallel", 2]
    command = [sys.executable, "-m", "nanovllm.batch", *map(str, files), *ENGINE, "--max-num-seqs", "8"]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "BATCH_TEST": str(tmp_path)}) as process:
        try:
            deadline = time.monotonic() + 200
            while output.read_bytes().count(b"\n") < 100:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            actors = processes_of(b"ray::Engine", f"BATCH_TEST={tmp_path}")
            assert len(actors) == 2
            os.kill(actors[0], signal.SIGKILL)
            assert len(read_answers(output)) < num_lines
            assert process.wait(200) == 0
        finally:
            process.kill()
    answers = read_answers(output)
    assert [answer["line"] for answer in answers] == list(range(1, num_lines + 1))
    assert [answer["line"] for answer in answers if answer.get("error")] == [num_lines]
    with LLM(str(checkpoint), **EXACT, num_kvcache_blocks=200) as llm:
        asked = [0, 100, 600, 1198]
        expected = llm.generate([lines[i]["prompt"] for i in asked], SamplingParams(0, 24), use_tqdm=False)
    assert [answers[i]["token_ids"] for i in asked] == [result["token_ids"] for result in expected]


@pytest.mark.slow
def test_a_cluster_that_is_there_gives_each_engine_a_gpu(tmp_path, checkpoint):
    """Ray is told of GPUs that need not exist: the engines look for themselves."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    program = (
        "import ray; print(ray.init(num_cpus=3, num_gpus=2).address_info['address'], flush=True); input()"
    )
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": [i], "ignore_eos": True} for i in range(40)])
    output = tmp_path / "out.jsonl"

    def run_alone(count: int, *options) -> str:
        """In a process of its own: Ray keeps the way of proving who one is that it has begun with."""
        files = ["--model", checkpoint, "--input", source, "--output", output, "--resume"]
        options = ["--data-parallel", count, "--ray-address", address, *options, "--max-tokens", 4]
        command = [sys.executable, "-m", "nanovllm.batch", *map(str, [*files, *ENGINE, *options])]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stderr

    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as cluster:
        try:
            address = cluster.stdout.readline().strip()
            assert "needs 3 GPUs, but the Ray cluster has 2" in run_alone(3, "--device", "auto")
            message = "kvcache_block_size must be a multiple of 16, got 17"
            assert message in run_alone(1, "--device", "auto", "--kvcache-block-size", 17)
            assert "40 lines, 0 of them errors" in run_alone(2, "--device", "auto")
        finally:
            cluster.communicate("\n")
    assert [len(answer["token_ids"]) for answer in read_answers(output)] == [4] * 40
