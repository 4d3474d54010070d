"""The worked examples of docs/lab: each checks what it claims."""

import importlib
import re
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parents[3] / "docs" / "lab"
EXAMPLES = sorted(path.stem for path in LAB.glob("*.py") if path.stem != "harness")


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.syspath_prepend(str(LAB))
    yield
    for name in (*EXAMPLES, "harness"):
        sys.modules.pop(name, None)


SLOW = "ban_words", "four_bit_keys", "my_attention", "watch_blocks"  # several engines with a real model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in EXAMPLES]
)
def test_an_example_shows_what_it_says(lab, name, monkeypatch, capsys):
    example = importlib.import_module(name)
    if name == "ten_thousand_requests":
        monkeypatch.setattr(example, "COUNT", 500)
    example.main()
    assert "is called by" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_uses_no_private_name(name):
    source = (LAB / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 100
    assert not re.search(r"\._(?!_)|setattr|mock|patch", source)


def test_a_report_is_kept_and_drawn(lab, tmp_path):
    harness = importlib.import_module("harness")
    from nanovllm.extensions.lab.simulator import Simulator

    with Simulator() as engine:
        report = harness.run(engine, harness.burst(count=20))
    report.save(tmp_path / "report.json")
    harness.plot({"plain": report}, tmp_path / "plot.png")
    assert (tmp_path / "report.json").stat().st_size and (tmp_path / "plot.png").stat().st_size
    assert harness.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert harness.burst(seed=1) == harness.burst(seed=1) != harness.burst(seed=2)
