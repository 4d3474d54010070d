"""Random histories of the simulated engine, some chosen by hypothesis, which shrinks what it finds."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import MUTATIONS, ROOT, apply
from simulation import Simulation, simulate


@pytest.mark.slow
def test_a_long_run_breaks_no_rule_and_visits_everything():
    counts = Counter()
    simulate(seed=2, num_steps=30_000, counts=counts)
    names = ["steps", "prefills", "preemptions", "requests", "completions of the same prompt", "finished"]
    names += ["aborts", "clears", "failures", "refused", "ended by the context"]
    names += ["decode steps in the middle of a prompt", "held back", "tokens read as shared prefixes"]
    names += ["copies", "copies for which no block was free", "released blocks"]
    assert all(counts[name] > 50 for name in names), counts
    assert counts["preemptions in the middle of a prompt"] and counts["overtaken"], counts


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_no_history_breaks_a_rule(pick):
    Simulation(pick).run(40)


def test_every_fault_of_the_mutation_check_can_still_be_made(tmp_path):
    lost = []
    for mutation in MUTATIONS:
        (tmp_path / mutation.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mutation.file).write_text((ROOT / mutation.file).read_text())
        try:
            apply(mutation, tmp_path)
            compile((tmp_path / mutation.file).read_text(), mutation.file, "exec")
        except (AssertionError, SyntaxError) as error:
            lost.append(f"{mutation}: {error}")
    assert not lost
