"""example.py and bench.py on a small random checkpoint."""

import json
import random
import re
import subprocess
import sys
import time
import types
from operator import itemgetter
from pathlib import Path

import pytest

import bench
import example
from nanovllm import LLM, SamplingParams
from nanovllm import llm as llm_module
from nanovllm.batch import __main__ as batch
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
    monkeypatch.setattr(example, "run_batch", lambda argv: asked.append(batch.parse_args(argv)))
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


def test_a_user_error_is_one_line():
    command = [sys.executable, "example.py", "--model", "missing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("example.py: model 'missing'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("error, status", [("KeyboardInterrupt", 130), ("RuntimeError('out of memory')", 1)])
def test_an_example_that_is_ended_shows_no_traceback(error, status):
    program = f"""
import runpy, nanovllm
def end(*_, **__):
    raise {error}
nanovllm.LLM.__init__ = end
runpy.run_path("example.py", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.startswith("example.py: ") and "Traceback" not in done.stderr


# --- bench.py ---


def test_the_default_workload_is_the_one_that_engines_compare_on():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    max_tokens = [random.randint(100, 1024) for _ in range(256)]
    args = bench.parse_args([])
    workload = bench.draw_workload(args)
    assert workload == bench.Workload(prompts, max_tokens)
    assert workload.num_output_tokens == 133_966
    assert (args.workload, args.temperature, args.max_model_len) == ("nano", 0.6, None)


@pytest.mark.parametrize(
    ("name", "num_prompts", "num_tokens", "num_distinct", "num_drawn"),
    [
        ("shared", 1024, 1024 * 2050, 2000 + 1024 * 50, 1024 * 128),
        ("groups", 4 * 128, 4 * 128 * 3100, 4 * 3000 + 4 * 128 * 100, 4 * 128 * 200),
        ("rollout", 64, 64 * 1000, 64 * 1000, 64 * 16 * 256),
        ("long", 16, 16 * 16_000, 16 * 16_000, 16 * 256),
        ("short", 2048, 2048 * 32, 2048 * 32, 2048 * 64),
    ],
)
def test_a_workload_has_its_numbers(name, num_prompts, num_tokens, num_distinct, num_drawn):
    args = bench.parse_args(["--workload", name])
    workload = bench.draw_workload(args)
    assert len(workload.prompts) == num_prompts
    assert sum(map(len, workload.prompts)) == num_tokens
    assert sum(end - begin for begin, end, _ in workload.segments()) == num_distinct
    assert workload.num_output_tokens == num_drawn
    assert args.max_model_len == (16_256 if name == "long" else None)


def test_options_go_before_what_the_workload_sets():
    options = "--workload groups --num-seqs 8 --groups 2 --common-len 9 --min-input-len 5 --n 3".split()
    workload = bench.draw_workload(bench.parse_args([*options, "--max-model-len", "20"]))
    assert (len(workload.prompts), workload.common_len, workload.n) == (8, 9, 3)
    assert all(9 + 5 <= len(prompt) <= 9 + 100 for prompt in workload.prompts)
    begins = [tuple(prompt[:9]) for prompt in workload.prompts]
    assert sorted(map(begins.count, set(begins))) == [4, 4]
    assert begins != sorted(begins) and begins != sorted(begins, reverse=True)  # they arrive mixed
    assert bench.parse_args([*options, "--max-model-len", "20"]).max_model_len == 20


def common_lengths(prompts: list[list[int]]) -> list[int]:
    """How many tokens each prompt begins with that every other one begins with as well."""
    first = prompts[0]
    return [next(i for i in range(len(first)) if p[i] != first[i]) for p in prompts[1:]]


def test_fresh_tokens_keep_what_prompts_have_in_common_and_nothing_else():
    workload = bench.draw_workload(bench.parse_args("--workload shared --num-seqs 8".split()))
    fresh, warmup = workload.with_fresh_tokens(1), workload.for_warmup(8)
    for prompts in (workload.prompts, fresh.prompts, warmup.prompts):
        assert common_lengths(prompts) == [2000] * 7
    assert len({work.prompts[0][0] for work in (workload, fresh, warmup)}) == 3
    assert fresh.segments() == workload.segments()


def test_the_warmup_has_every_batch_size_although_all_sequences_of_the_workload_end_together():
    workload = bench.draw_workload(bench.parse_args("--workload rollout --num-seqs 4".split()))
    warmup = workload.for_warmup(40)
    assert (len(warmup.prompts), warmup.n) == (40, 1)
    assert warmup.max_tokens == list(range(2, 42))
    assert warmup.prompts[0] == warmup.prompts[15] != warmup.prompts[16]


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


@pytest.mark.parametrize(
    "options",
    [
        "--num-seqs 0", "--min-input-len 9 --max-input-len 8", "--repeats 0", "--common-len -1",
        "--workload x", "--limit-strings",
    ],
)  # fmt: skip
def test_impossible_workloads_are_refused(options):
    with pytest.raises(SystemExit):
        bench.parse_args(options.split())


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, capsys, option):
    for file in (tmp_path / "missing" / "file.png", tmp_path):
        with pytest.raises(SystemExit):
            bench.parse_args([option, str(file)])
        assert f"{option} {file} cannot be written: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.parse_args(["--plot", str(tmp_path / "run.mp3")])
    assert "the name must end in one of ." in capsys.readouterr().err
    kept = tmp_path / "kept.png"
    kept.write_text("kept")
    for file in (kept, tmp_path / "new.png"):
        assert getattr(bench.parse_args([option, str(file)]), option.strip("-")) == str(file)
    assert kept.read_text() == "kept" and not (tmp_path / "new.png").exists()


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
        assert run["prefill_tokens"] + run["cached_tokens"] == sum(map(len, workload.prompts))
        assert run["decode_tokens"] == sum(workload.max_tokens) - len(workload.prompts)
        assert 0 < run["prefill_seconds"] + run["decode_seconds"] <= run["seconds"]
    assert len(ours["repeats"]) == len(theirs["repeats"]) == 3
    assert ours["tokens_per_second_min"] <= ours["tokens_per_second"] <= ours["tokens_per_second_max"]
    assert "nanovllm / transformers" in capsys.readouterr().out


TINY = {
    "shared": "--num-seqs 6 --common-len 40 --min-input-len 3 --max-input-len 9",
    "groups": "--num-seqs 8 --common-len 40 --min-input-len 3 --max-input-len 9",
    "rollout": "--num-seqs 2 --n 3 --min-input-len 30 --max-input-len 30",
    "long": "--num-seqs 2 --min-input-len 300 --max-input-len 300",
    "short": "--num-seqs 7 --min-input-len 8 --max-input-len 8",
}


@pytest.mark.parametrize("name", TINY)
def test_both_engines_do_every_workload(name, checkpoint, capsys):
    options = f"--workload {name} {TINY[name]} --min-output-len 4 --max-output-len 6 --max-model-len 400"
    options += f" --engine both --model {checkpoint} --device cpu --repeats 2 --json -"
    bench.main(options.split())
    captured = capsys.readouterr()
    workload = bench.draw_workload(bench.parse_args(options.split()))
    results = json.loads(captured.out)["results"]
    for result in results.values():
        assert {run["output_tokens"] for run in result["repeats"]} == {workload.num_output_tokens}
    ours = results["nanovllm"]
    asked_for = workload.n * sum(map(len, workload.prompts))
    for run in ours["repeats"]:  # none has found what the one before it has left in the cache
        assert sum(end - begin for begin, end, _ in workload.segments()) - 20 <= run["prefill_tokens"]
        assert run["prefill_tokens"] <= asked_for
    assert ours["floor"]["seconds"] > 0
    assert captured.err.startswith(f"{name}: {len(workload.prompts)} prompts of ")


def test_bench_tells_what_was_shared(checkpoint, capsys):
    options = "--workload shared --num-seqs 4 --common-len 300 --min-input-len 3 --max-input-len 9"
    options += f" --min-output-len 2 --max-output-len 2 --model {checkpoint} --device cpu --repeats 1"
    bench.main([*options.split(), "--max-num-seqs", "1", "--max-model-len", "400"])
    printed = capsys.readouterr().out
    taken_over = re.search(r"^  shared +([\d,]+) tokens taken over, [\d,]+ copied", printed, re.MULTILINE)
    assert int(taken_over[1].replace(",", "")) >= 3 * 256  # whole blocks at least


def test_bench_says_what_llama_cpp_needs(checkpoint, monkeypatch):
    options = [*SMALL, "--model", str(checkpoint), "--device", "cpu", "--engine", "llama.cpp"]
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ValueError, match="pip install llama-cpp-python"):
        bench.main(options)
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    with pytest.raises(ValueError, match="a .gguf file"):
        bench.main(options)


def test_bench_can_print_json_alone(checkpoint, capsys):
    options = ["--kv-cache-dtype", "int8", "--repeats", "1", "--json", "-"]
    bench.main([*SMALL, "--model", str(checkpoint), *options])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["num_seqs"] == 5
    assert "tok/s" in captured.err
    assert re.search("^nanovllm: [1-9][0-9,]+ tokens of KV cache, kv_cache_dtype=int8$", captured.err, re.M)


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


@pytest.mark.parametrize("cache_dtype, row_bytes", [("auto", 16 * 4), ("int8", 16 + 2)])
def test_the_floor_counts_weights_once_a_step_and_every_key_and_value_read(tmp_path, cache_dtype, row_bytes):
    folder = make_checkpoint(tmp_path / "model", tie_word_embeddings=True, head_dim=16)
    args = bench.parse_args(["--model", str(folder), "--device", "cpu", "--kv-cache-dtype", cache_dtype])
    engine = bench.NanoVLLM(args)
    work = bench.Workload([[1] * 10, [2] * 20], [3, 5])
    floor = engine.floor(work, bench.Ceilings(bandwidth=1e9, flops=1e12))
    parameters = sum(p.numel() for p in engine.llm.model_runner.model.parameters())
    kv_bytes = 2 * 2 * 2 * row_bytes  # keys and values, layers, heads
    reads = (10 + 1) + (10 + 2) + (20 + 1) + (20 + 2) + (20 + 3) + (20 + 4)
    assert floor["decode_bytes"] == 4 * parameters * 4 + kv_bytes * reads
    shared = bench.Workload([[1] * 10, [1] * 8 + [2] * 12], [3, 5], common_len=8, n=2)
    floor = engine.floor(shared, bench.Ceilings(bandwidth=1e9, flops=1e12))
    reads = 4 * 8 + (2 * 2 + 4 * 12) + 2 * (1 + 2 + 1 + 2 + 3 + 4)  # in common, of each prompt, drawn
    assert floor["decode_bytes"] == 4 * parameters * 4 + kv_bytes * reads
    engine.close()


def test_the_floor_counts_quantised_weights_as_they_are_stored(tmp_path):
    folder, floors = make_checkpoint(tmp_path / "model", tie_word_embeddings=True, head_dim=16), []
    for options in ([], ["--quantization", "int4"]):
        engine = bench.NanoVLLM(bench.parse_args(["--model", str(folder), "--device", "cpu", *options]))
        floors.append(engine.floor(bench.Workload([[1] * 10], [2]), bench.Ceilings(1e9, 1e12)))
        engine.close()
    plain, packed = floors
    matrices = 2 * (64 * (4 + 2 + 2) * 16 + 64 * 64 + 3 * 64 * 96)
    assert plain["prefill_flops"] == packed["prefill_flops"]
    assert plain["decode_bytes"] - packed["decode_bytes"] == matrices * (32 - 4 - 32 // 32) // 8


def test_answers_that_fit_schemas_are_timed_beside_free_ones_of_the_same_lengths(
    tmp_path, checkpoint, capsys
):
    options = f"--structured --model {checkpoint} --load-format dummy --device cpu --num-seqs 40 --repeats 1"
    options += f" --min-input-len 2 --max-input-len 9 --max-output-len 120 --json {tmp_path / 'report.json'}"
    bench.main(options.split())
    report = json.loads((tmp_path / "report.json").read_text())["results"]["structured"]
    [run] = report["repeats"]
    assert run["ratio"] == report["ratio"] == run["structured"] / run["free"] > 0
    assert 0 < run["ended"] <= 40 < run["tokens"] <= 40 * 120
    assert f"{run['ended']} ended and fit their schemas, {run['tokens']:,} tokens" in capsys.readouterr().out
