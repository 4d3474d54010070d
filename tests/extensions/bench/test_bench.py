"""The benchmark beyond bench.py's page, on a small random checkpoint."""

import json
import platform
import re
import sys
import time
import types
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from nanovllm import SamplingParams
from nanovllm.extensions.bench.__main__ import main, parse_args
from nanovllm.extensions.bench.engine import NanoVLLM
from nanovllm.extensions.bench.floor import floor
from nanovllm.extensions.bench.report import describe_cpu, plot
from nanovllm.extensions.bench.workloads import Workload, draw_workload
from nanovllm.extensions.text import llm as text_llm
from tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


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
    args = parse_args(["--workload", name])
    workload = draw_workload(args)
    assert len(workload.prompts) == num_prompts
    assert sum(map(len, workload.prompts)) == num_tokens
    assert sum(end - begin for begin, end, _ in workload.segments()) == num_distinct
    assert workload.num_output_tokens == num_drawn
    assert args.max_model_len == (16_256 if name == "long" else 0)


def test_options_go_before_what_the_workload_sets():
    options = "--workload groups --num-seqs 8 --groups 2 --common-len 9 --min-input-len 5 --n 3".split()
    workload = draw_workload(parse_args([*options, "--max-model-len", "20"]))
    assert (len(workload.prompts), workload.common_len, workload.n) == (8, 9, 3)
    assert all(9 + 5 <= len(prompt) <= 9 + 100 for prompt in workload.prompts)
    begins = [tuple(prompt[:9]) for prompt in workload.prompts]
    assert sorted(map(begins.count, set(begins))) == [4, 4]
    assert begins != sorted(begins) and begins != sorted(begins, reverse=True)  # they arrive mixed
    assert parse_args([*options, "--max-model-len", "20"]).max_model_len == 20


def common_lengths(prompts: list[list[int]]) -> list[int]:
    """How many tokens each prompt begins with that every other one begins with as well."""
    first = prompts[0]
    return [next(i for i in range(len(first)) if p[i] != first[i]) for p in prompts[1:]]


def test_fresh_tokens_keep_what_prompts_have_in_common_and_nothing_else():
    workload = draw_workload(parse_args("--workload shared --num-seqs 8".split()))
    fresh, warmup = workload.with_fresh_tokens(1), workload.for_warmup(8)
    for prompts in (workload.prompts, fresh.prompts, warmup.prompts):
        assert common_lengths(prompts) == [2000] * 7
    assert len({work.prompts[0][0] for work in (workload, fresh, warmup)}) == 3
    assert fresh.segments() == workload.segments()


def test_the_warmup_has_every_batch_size_although_all_sequences_of_the_workload_end_together():
    workload = draw_workload(parse_args("--workload rollout --num-seqs 4".split()))
    warmup = workload.for_warmup(40)
    assert (len(warmup.prompts), warmup.n) == (40, 1)
    assert warmup.max_tokens == list(range(2, 42))
    assert warmup.prompts[0] == warmup.prompts[15] != warmup.prompts[16]


def test_fresh_tokens_keep_the_lengths():
    workload = draw_workload(parse_args(["--num-seqs", "8"]))
    fresh = workload.with_fresh_tokens(1)
    assert [len(p) for p in fresh.prompts] == [len(p) for p in workload.prompts]
    assert fresh.max_tokens == workload.max_tokens
    assert all(a[:16] != b[:16] for a, b in zip(fresh.prompts, workload.prompts, strict=True))


def test_output_lengths_can_be_spread_evenly():
    options = "--num-seqs 32 --min-output-len 16 --max-output-len 256 --spread-output".split()
    max_tokens = draw_workload(parse_args(options)).max_tokens
    gaps = {b - a for a, b in zip(max_tokens, max_tokens[1:], strict=False)}
    assert (len(max_tokens), max_tokens[0], max_tokens[-1]) == (32, 16, 256)
    assert gaps == {7, 8}


def test_token_ids_fit_the_vocabulary():
    args = parse_args("--num-seqs 3 --common-len 4".split())
    whole, folded = draw_workload(args), draw_workload(args, 320)
    assert folded.prompts == [[token % 320 for token in prompt] for prompt in whole.prompts]
    assert max(map(max, folded.with_fresh_tokens(1).prompts)) < 320


@pytest.mark.parametrize(
    "options",
    [
        "--num-seqs 0", "--min-input-len 9 --max-input-len 8", "--repeats 0", "--common-len -1",
        "--workload x", "--limit-strings",
    ],
)  # fmt: skip
def test_impossible_workloads_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        parse_args(options.split())
    *_, name = re.findall("--[a-z-]+", options)
    assert name in capsys.readouterr().err.rpartition("error: ")[2]


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, capsys, option):
    for file in (tmp_path / "missing" / "file.png", tmp_path):
        with pytest.raises(SystemExit):
            parse_args([option, str(file)])
        assert f"{option} {file} cannot be written: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_args(["--plot", str(tmp_path / "run.mp3")])
    assert "the name must end in one of ." in capsys.readouterr().err
    kept = tmp_path / "kept.png"
    kept.write_text("kept")
    for file in (kept, tmp_path / "new.png"):
        assert getattr(parse_args([option, str(file)]), option.strip("-")) == str(file)
    assert kept.read_text() == "kept" and not (tmp_path / "new.png").exists()


SMALL = "--device cpu --num-seqs 5 --min-input-len 4 --max-input-len 40 --min-output-len 2".split()
SMALL += ["--max-output-len", "9"]


def test_bench_compares_both_engines_on_the_same_work(tmp_path, checkpoint, capsys):
    report_file = tmp_path / "report.json"
    options = ["--engine", "both", "--model", str(checkpoint), "--repeats", "3", "--batch-size", "2"]
    main([*SMALL, *options, "--json", str(report_file)])
    report = json.loads(report_file.read_text())
    workload = draw_workload(parse_args(SMALL))
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
    main(options.split())
    captured = capsys.readouterr()
    workload = draw_workload(parse_args(options.split()))
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
    main([*options.split(), "--max-num-seqs", "1", "--max-model-len", "400"])
    printed = capsys.readouterr().out
    taken_over = re.search(r"^  shared +([\d,]+) tokens taken over, [\d,]+ copied", printed, re.MULTILINE)
    assert int(taken_over[1].replace(",", "")) >= 3 * 256  # whole blocks at least


def test_bench_says_what_llama_cpp_needs(checkpoint, monkeypatch):
    options = [*SMALL, "--model", str(checkpoint), "--device", "cpu", "--engine", "llama.cpp"]
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ValueError, match="pip install llama-cpp-python"):
        main(options)
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    with pytest.raises(ValueError, match="a .gguf file"):
        main(options)


def test_bench_can_print_json_alone(checkpoint, capsys):
    options = ["--kv-cache-dtype", "int8", "--repeats", "1", "--json", "-"]
    main([*SMALL, "--model", str(checkpoint), *options])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["num_seqs"] == 5
    assert "tok/s" in captured.err
    assert re.search("^nanovllm: [1-9][0-9,]+ tokens of KV cache, kv_cache_dtype=int8$", captured.err, re.M)


@pytest.mark.slow
def test_bench_draws_the_run_traces_steps_and_states_the_floor(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "model")
    arguments = f"--model {folder} --num-seqs 6 --min-input-len 5 --max-input-len 30 --max-output-len 200"
    files = ["--trace", str(tmp_path / "trace.json"), "--plot", str(tmp_path / "run.png"), "--json", "-"]
    main([*arguments.split(), "--repeats", "1", "--device", "cpu", *files])
    report = json.loads(capsys.readouterr().out)
    least = report["results"]["nanovllm"]["floor"]
    assert 0 < least["seconds"] < report["results"]["nanovllm"]["seconds"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert report["versions"]["nanovllm"] == "0.1.0" and report["versions"]["transformers"]
    assert report["cpu"] and report["device"].startswith(f"{report['cpu']} with ")


def test_the_cpu_is_named_where_the_system_knows_it(monkeypatch):
    told = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nmodel\t\t: 6\nmodel name\t: A CPU @ 2 GHz\n"
    monkeypatch.setattr(Path, "read_text", lambda _: told)
    assert describe_cpu() == "A CPU @ 2 GHz"
    monkeypatch.setattr(Path, "read_text", lambda _: "Features: fp asimd")
    assert describe_cpu() == (platform.processor() or platform.machine())


def test_a_plot_spreads_the_tokens_of_a_step_over_its_time(monkeypatch, tmp_path):
    """Few tokens in long steps are a low bar throughout, and not a high one now and then."""
    drawn, steps = [], [(4.0, 800, 0, 3, 7)] + [(4.0 + i, 0, 3, 3, 7) for i in range(1, 17)]
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: drawn.append(figure))
    plot(steps, "a title", "run.png")
    [figure] = drawn
    assert figure.get_suptitle() == "a title"
    prefill, decode, running, used = figure.axes
    assert [running.lines[0].get_ydata()[0], used.lines[0].get_ydata()[0]] == [3, 7]
    for axis, begin, end, speed in ((prefill, 0, 20, 200), (decode, 20, 100, 3)):
        expected = [speed if begin <= i < end else 0 for i in range(100)]
        assert axis.patches[0].get_data().values == pytest.approx(expected)
    assert [axis.get_ylabel() for axis in (prefill, decode)] == ["prefill tok/s", "decode tok/s"]


def test_the_call_that_only_launches_a_step_counts_to_its_phase(checkpoint, monkeypatch):
    """As on a GPU, where the first call collects nothing: the prefill has all of its time, and no decode."""
    shown = []
    engine = NanoVLLM(parse_args(["--model", str(checkpoint), "--device", "cpu"]))
    engine.llm._overlap = True
    prepare = engine.llm.model_runner.prepare_prefill
    monkeypatch.setattr(
        engine.llm.model_runner, "prepare_prefill", lambda batch: (time.sleep(0.5), prepare(batch))[1]
    )
    monkeypatch.setattr(text_llm.tqdm, "set_postfix", lambda _, speed, **__: shown.append(dict(speed)))
    prompts = [[1] * 10, [2] * 20]
    run = engine.run(Workload(prompts, [3, 3]))
    assert run["prefill_seconds"] > 0.5 > run["decode_seconds"]
    assert (run["prefill_tokens"], run["decode_tokens"]) == (30, 4)
    assert run["prefill_seconds"] + run["decode_seconds"] == pytest.approx(run["seconds"])
    assert all(decoded or i == 0 for i, (_, _, decoded, *_) in enumerate(engine.timeline))
    engine.llm.generate(prompts, SamplingParams(0, 3, True))
    assert shown[0] == {"Prefill": "-", "Decode": "-"}
    assert shown[1]["Decode"] == "-" and 0 < int(shown[1]["Prefill"].removesuffix("tok/s")) < 30 / 0.5
    engine.close()


@pytest.mark.parametrize("cache_dtype, row_bytes", [("auto", 16 * 4), ("int8", 16 + 2)])
def test_the_floor_counts_weights_once_a_step_and_every_key_and_value_read(tmp_path, cache_dtype, row_bytes):
    folder = make_checkpoint(tmp_path / "model", tie_word_embeddings=True, head_dim=16)
    args = parse_args(["--model", str(folder), "--device", "cpu", "--kv-cache-dtype", cache_dtype])
    engine = NanoVLLM(args)
    work = Workload([[1] * 10, [2] * 20], [3, 5])
    ceilings = {"bandwidth": 1e9, "flops": 1e12}
    least = floor(engine.llm, work, ceilings)
    parameters = sum(p.numel() for p in engine.llm.model_runner.model.parameters())
    kv_bytes = 2 * 2 * 2 * row_bytes  # keys and values, layers, heads
    reads = (10 + 1) + (10 + 2) + (20 + 1) + (20 + 2) + (20 + 3) + (20 + 4)
    assert least["decode_bytes"] == 4 * parameters * 4 + kv_bytes * reads
    shared = Workload([[1] * 10, [1] * 8 + [2] * 12], [3, 5], common_len=8, n=2)
    least = floor(engine.llm, shared, ceilings)
    reads = 4 * 8 + (2 * 2 + 4 * 12) + 2 * (1 + 2 + 1 + 2 + 3 + 4)  # in common, of each prompt, drawn
    assert least["decode_bytes"] == 4 * parameters * 4 + kv_bytes * reads
    engine.close()


def test_the_floor_counts_quantised_weights_as_they_are_stored(tmp_path):
    folder, floors = make_checkpoint(tmp_path / "model", tie_word_embeddings=True, head_dim=16), []
    for options in ([], ["--quantization", "int4"]):
        engine = NanoVLLM(parse_args(["--model", str(folder), "--device", "cpu", *options]))
        floors.append(floor(engine.llm, Workload([[1] * 10], [2]), {"bandwidth": 1e9, "flops": 1e12}))
        engine.close()
    plain, packed = floors
    matrices = 2 * (64 * (4 + 2 + 2) * 16 + 64 * 64 + 3 * 64 * 96)
    assert plain["prefill_flops"] == packed["prefill_flops"]
    assert plain["decode_bytes"] - packed["decode_bytes"] == matrices * (32 - 4 - 32 // 32) // 8


@pytest.mark.slow
def test_answers_that_fit_schemas_are_timed_beside_free_ones_of_the_same_lengths(
    tmp_path, checkpoint, capsys
):
    options = f"--structured --model {checkpoint} --load-format dummy --device cpu --num-seqs 40 --repeats 1"
    options += " --min-input-len 2 --max-input-len 9 --min-output-len 2 --max-output-len 70"
    options += f" --json {tmp_path / 'report.json'}"
    main(options.split())
    report = json.loads((tmp_path / "report.json").read_text())["results"]["structured"]
    [run] = report["repeats"]
    assert run["ratio"] == report["ratio"] == pytest.approx(run["structured"] / run["free"])
    assert 0 < run["ended"] <= 40 < run["tokens"] <= 40 * 70
    assert f"{run['ended']} ended and fit their schemas, {run['tokens']:,} tokens" in capsys.readouterr().out
