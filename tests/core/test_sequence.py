"""A request: its tokens, and the blocks that they take (design.md section 3)."""

import pytest
from block_pool import make_sequence


@pytest.mark.parametrize(
    "length, blocks, last", [(1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 1), (32, 2, 16)]
)
def test_a_sequence_counts_its_blocks(length, blocks, last):
    sequence = make_sequence(range(length), 16)
    assert (sequence.num_blocks, sequence.last_block_num_tokens) == (blocks, last)
    assert [token for i in range(blocks) for token in sequence.block(i)] == list(range(length))


def test_a_sequence_tells_its_prompt_from_its_completion():
    tokens = [5, 6, 7]
    sequence = make_sequence(tokens, 16)
    sequence.append_token(8)
    sequence.append_token(9)
    assert tokens == [5, 6, 7], "the caller's list is not the sequence's"
    assert len(sequence) == sequence.num_tokens == 5 and sequence.num_prompt_tokens == 3
    assert list(sequence.prompt_token_ids) == [5, 6, 7] and list(sequence.completion_token_ids) == [8, 9]
    assert sequence.num_completion_tokens == 2 and sequence.last_token == sequence[4] == 9
    assert not sequence.is_finished
    assert make_sequence([1]).seq_id != sequence.seq_id
