"""example.py and bench.py on a small random checkpoint, and a script that measures."""

import json
import os
import random
import runpy
import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from unittest.mock import Mock

import pytest

import bench
import example
from nanovllm import LLM, SamplingParams
from nanovllm.extensions.batch import __main__ as batch
from nanovllm.extensions.bench.__main__ import parse_args
from nanovllm.extensions.bench.workloads import draw_workload
from tiny_checkpoints import make_checkpoint

ROOT = Path(example.__file__).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


# --- example.py ---


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_two_questions_are_asked_through_the_chat_template(tmp_path, checkpoint, capsys):
    options = f"--model {checkpoint} --device cpu --temperature 0 --max-tokens 3".split()
    example.main(options)
    example.main([*options, "--output", str(tmp_path / "out.jsonl")])
    with LLM(str(checkpoint), device="cpu") as llm:
        chats = [[{"role": "user", "content": question}] for question in example.QUESTIONS]
        expected = llm.chat(chats, SamplingParams(0, 3))
    printed = capsys.readouterr().out
    for question, result in zip(example.QUESTIONS, expected, strict=True):
        assert f"Prompt: {question}\nCompletion: {result['text']}\n" in printed
    answers = read_jsonl(tmp_path / "out.jsonl")
    assert [answer["token_ids"] for answer in answers] == [result["token_ids"] for result in expected]


def test_a_file_of_prompts_goes_to_the_batch_tool_with_all_options(tmp_path, monkeypatch):
    prompts, asked = tmp_path / "in.txt", []
    prompts.write_text("abc\n")
    monkeypatch.setattr(batch, "run_command", lambda argv: asked.append(batch.parse_args(argv)))
    example.main(["--prompts", str(prompts)])
    options = "--model m --output out --temperature 0 --max-tokens 4 --tensor-parallel-size 2 --enforce-eager"
    example.main([*options.split(), *f"--device cpu --seed 3 --top-k=5 --resume --prompts={prompts}".split()])
    plain, full = asked
    assert (plain.model, plain.input, plain.engine) == ("smollm2", prompts, {})
    assert (plain.defaults["temperature"], plain.defaults["max_tokens"]) == (0.6, 256)
    assert (full.model, full.input, full.output) == ("m", prompts, Path("out"))
    assert full.resume
    assert full.engine == {"tensor_parallel_size": 2, "enforce_eager": True, "device": "cpu"}
    assert full.defaults == {"temperature": 0, "max_tokens": 4, "top_k": 5, "seed": 3}


def test_the_answers_of_a_file_are_printed_where_no_output_is_named(tmp_path, checkpoint):
    prompts = tmp_path / "in.txt"
    prompts.write_text("abc\n\nabcabc\n")
    command = f"example.py --model {checkpoint} --device cpu --max-tokens 4 --prompts {prompts}".split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    answers = sorted(map(json.loads, done.stdout.splitlines()), key=itemgetter("line"))
    assert [(answer["line"], len(answer["token_ids"])) for answer in answers] == [(1, 4), (3, 4)]


def test_options_of_the_batch_tool_need_prompts(capsys):
    with pytest.raises(SystemExit):
        example.main(["--resume"])
    assert "unrecognized arguments: --resume" in capsys.readouterr().err


def test_a_user_error_is_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["example.py", "--model", "missing"])
    with pytest.raises(SystemExit, match="^example.py: model 'missing'"):  # which Python prints
        runpy.run_path(example.__file__, run_name="__main__")


@pytest.mark.parametrize(
    "error, status", [(KeyboardInterrupt, 130), (RuntimeError("out of memory"), "example.py: out of memory")]
)
def test_an_example_that_is_ended_shows_no_traceback(monkeypatch, capsys, error, status):
    monkeypatch.setattr(LLM, "__init__", Mock(side_effect=error))
    monkeypatch.setattr("sys.argv", ["example.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(example.__file__, run_name="__main__")
    assert ended.value.code == status  # a text is what Python prints before it ends with 1
    assert capsys.readouterr().err == ("example.py: interrupted\n" if status == 130 else "")


# --- other systems, progress bars ---


def test_scripts_run_without_what_windows_does_not_have(tmp_path, checkpoint):
    (tmp_path / "in.txt").write_text("abc\nabcabc\n")
    program = f"""
import asyncio, os, pathlib, signal, subprocess, sys
import torch, transformers, tqdm.auto  # they look at sys.platform
for name in "fcntl grp pwd readline resource termios tty".split():
    sys.modules[name] = None
for name in "WNOHANG fork getuid killpg mkfifo register_at_fork sched_getaffinity setsid".split():
    delattr(os, name)
for name in "SIGALRM SIGHUP SIGKILL SIGUSR1 pthread_sigmask".split():
    delattr(signal, name)
import bench, example, nanovllm, nanovllm.extensions.bench.__main__, nanovllm.extensions.server.__main__
from nanovllm.extensions.batch.files import find_lines, open_output
example.main("--model {checkpoint} --device cpu --max-tokens 4 --prompts in.txt --output out.jsonl".split())
open_output(pathlib.Path("out.parquet"), False, find_lines(pathlib.Path("in.txt"))).close()
"""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, check=True)
    assert sorted(answer["line"] for answer in read_jsonl(tmp_path / "out.jsonl")) == [1, 2]


def test_tqdm_disable_hides_every_progress_bar_and_nothing_else(tmp_path, checkpoint):
    (tmp_path / "in.txt").write_text("abc\n")
    program = f"""
from nanovllm import LLM, SamplingParams
from nanovllm.extensions.batch.__main__ import Progress, run_command
with LLM({str(checkpoint)!r}, device="cpu") as llm:
    llm.generate("abc", SamplingParams(0, 2))
run_command("--model {checkpoint} --device cpu --input in.txt --output out.jsonl --max-tokens 4".split())
Progress(1).warn("heard")
"""
    command = [sys.executable, "-c", program]
    environ = os.environ | {"TQDM_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert "Generating" not in done.stderr and "Batch" not in done.stderr and "%|" not in done.stderr
    assert "1 lines, 0 of them errors, 4 tokens" in done.stderr and "nanovllm.batch: heard" in done.stderr


# --- bench.py ---


def test_the_default_workload_is_the_one_that_engines_compare_on():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    max_tokens = [random.randint(100, 1024) for _ in range(256)]
    assert bench.draw_workload("nano") == bench.Workload(prompts, max_tokens)
    assert sum(max_tokens) == 133_966


@pytest.mark.parametrize("name", bench.WORKLOADS)
def test_the_page_draws_the_same_work_as_the_extension(name):
    page, extension = bench.draw_workload(name), draw_workload(parse_args(["--workload", name]))
    assert (page.prompts, page.max_tokens) == (extension.prompts, extension.max_tokens)


def test_fresh_tokens_of_the_page_keep_lengths_and_what_is_shared():
    workload = bench.Workload([[7, 9, 10_000, 3], [7, 9, 5]], [1, 2])
    assert workload.with_fresh_tokens(0, 100) == bench.Workload([[7, 9, 0, 3], [7, 9, 5]], [1, 2])
    assert workload.with_fresh_tokens(1, 20_000) == bench.Workload([[8, 10, 0, 4], [8, 10, 6]], [1, 2])


def test_the_page_prints_what_the_engine_makes(checkpoint, monkeypatch, capsys):
    monkeypatch.setitem(bench.WORKLOADS, "shared", (6, (3, 9), (4, 8), 300))
    made, run = [], bench.run
    monkeypatch.setattr(bench, "run", lambda llm, work: made.append(run(llm, work)) or made[-1])
    bench.main(["--workload", "shared", "--model", str(checkpoint)])
    workload = bench.draw_workload("shared")
    assert len(made) == 1 + bench.NUM_REPEATS
    for figures in made:
        tokens, seconds = figures.tokens, figures.seconds
        assert tokens["output"] == sum(workload.max_tokens)
        assert tokens["decode"] == sum(workload.max_tokens) - len(workload.prompts)
        assert tokens["prefill"] + tokens["cached"] == sum(map(len, workload.prompts))
        assert tokens["cached"] >= 5 * 256  # whole blocks at least, of this repetition alone
        assert 0 < seconds["prefill"] + seconds["decode"] <= seconds["all"]
    printed = capsys.readouterr().out
    slowest, median, fastest = sorted(figures.speed for figures in made[1:])
    assert f"{median:,.1f} tok/s (median of 3, from {slowest:,.1f} to {fastest:,.1f})" in printed
    assert "  prefill " in printed and "  decode " in printed and "taken over from other prompts" in printed


@pytest.mark.parametrize("options", ["--n 2", "--workload groups", "--model smollm2", "--help", "--json=-"])
def test_what_the_page_does_not_know_goes_to_the_extension(monkeypatch, options):
    asked = []
    monkeypatch.setattr("nanovllm.extensions.bench.__main__.main", asked.append)
    bench.main(options.split())
    assert asked == [options.split()]


@pytest.mark.parametrize("options", ["--model missing", "--model missing --device cpu"])
def test_an_error_of_the_benchmark_is_one_line(monkeypatch, options):
    monkeypatch.setattr("sys.argv", ["bench.py", *options.split()])
    with pytest.raises(SystemExit, match="^bench.py: model 'missing'"):
        runpy.run_path(bench.__file__, run_name="__main__")


# --- tests/long/formats.py ---


@pytest.mark.slow
def test_a_format_is_measured_in_two_checkouts_in_turn():
    command = [sys.executable, "tests/long/formats.py", str(ROOT), "--tiny", "--formats", "NVFP4"]
    lines = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{ROOT.name}, NVFP4: {{'1': ") for line in lines)


# --- tests/long/decode_steps.py ---


@pytest.mark.slow
def test_decode_steps_are_timed_with_other_constants_which_are_taken_back():
    command = [
        sys.executable,
        "tests/long/decode_steps.py",
        "int4, groups of 32",
        "--rows",
        "2",
        "--tiny",
        "--try",
    ]
    command += ["quantised_matvec.HEIGHT = 1 / 0", "quantised_matvec.HEIGHT = quantised_matvec.HEIGHT + 1"]
    lines = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert lines[0].endswith("as it is") and lines[-1].endswith("as it is, again")
    assert lines[1].startswith("ZeroDivisionError") and lines[2].startswith("       0.0 us  quantised_matvec")
