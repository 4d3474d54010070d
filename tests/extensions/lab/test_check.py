"""`python -m nanovllm.extensions.lab check`, and the exercises that it judges."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.extensions.lab.check import PARTS

LAB = Path(__file__).parents[3] / "docs" / "lab"
PART_OF = {
    "1_blocks_of_a_sequence": "sequence",
    "2_find_a_block": "block_manager",
    "3_allocate": "block_manager",
    "4_the_border": "block_manager",
    "5_who_is_preempted": "scheduler",
    "6_after_a_step": "scheduler",
    "7_attention": "attention",
    "8_draw_a_token": "sampler",
}


def check(part, path, *options):
    command = [sys.executable, "-m", "nanovllm.extensions.lab", "check", part, str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_there_is_an_exercise_and_a_solution_of_each():
    for folder in ("exercises", "solutions"):
        assert sorted(path.stem for path in (LAB / folder).glob("*.py")) == sorted(PART_OF)


@pytest.mark.slow
@pytest.mark.parametrize("name", PART_OF)
def test_a_solution_holds(name):
    done = check(PART_OF[name], LAB / "solutions" / f"{name}.py", "--no-race")
    assert done.returncode == 0 and done.stdout.endswith(" statements hold, 0 do not.\n"), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1_blocks_of_a_sequence", "8_draw_a_token"])
def test_an_exercise_is_still_to_be_done(name):
    done = check(PART_OF[name], LAB / "exercises" / f"{name}.py")
    assert done.returncode == 1 and "does not hold: " in done.stdout and f"exercise {name[0]}" in done.stdout


@pytest.mark.slow
def test_what_holds_is_raced(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from nanovllm.engine import sequence\nclass Sequence(sequence.Sequence): pass\n")
    done = check("sequence", file)
    assert done.returncode == 0 and "x as long as ours (medians of 5" in done.stdout


@pytest.mark.slow
def test_a_class_with_a_fault_is_told_which_rule_it_breaks(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from nanovllm.engine import sequence\n"
        "class Sequence(sequence.Sequence):\n"
        "    last_block_num_tokens = property(lambda self: self.num_tokens % self.request.block_size)\n"
    )
    done = check("sequence", file)
    assert done.returncode == 1 and "does not hold: a sequence counts its blocks" in done.stdout


@pytest.mark.parametrize(
    "part, source, message",
    [
        ("nothing", "", "invalid choice"),
        ("model", "x = 1", "must have a class Qwen3ForCausalLM"),
        ("model", None, "no file"),
    ],
)
def test_what_cannot_be_checked_is_said(tmp_path, monkeypatch, capsys, part, source, message):
    file = tmp_path / "mine.py"
    if source is not None:
        file.write_text(source)
    monkeypatch.setattr("sys.argv", ["lab", "check", part, str(file)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("nanovllm.extensions.lab", run_name="__main__")
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("part", PARTS)
def test_every_race_can_be_run(part):
    PARTS[part].race()
