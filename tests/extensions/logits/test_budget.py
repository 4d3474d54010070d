"""What biases and bans of all requests may take on a device together."""

import pytest
from scheduling import (
    give_rules,
    make_engine,
    make_sequence,
    run_all,
    run_step,
)

from nanovllm.extensions.logits import bias


@pytest.mark.parametrize("most, admitted", [(8, 3), (7, 2), (4, 1)])
def test_rules_may_take_all_the_words_there_are_and_no_more(monkeypatch, most, admitted):
    monkeypatch.setattr(bias, "RULE_WORDS", most)
    scheduler, runner = make_engine()
    sequences = [make_sequence([i] * 5, 3, True) for i in range(3)]
    for sequence, num_words in zip(sequences, (4, 3, 1), strict=True):
        give_rules(sequence, num_words)
        scheduler.add(sequence)
    for _ in range(2):  # those that wait go on waiting while the others run
        assert run_step(scheduler, runner)[0] == sequences[:admitted]
    run_all(scheduler, runner)
    assert all(sequence.num_completion_tokens == 3 for sequence in sequences)
