"""The block manager beyond tests/core: sequences that begin anew."""

from block_pool import Manager, make_sequence


def test_tokens_that_a_failed_step_has_lost_leave_no_hash_behind():
    manager, seq = Manager(9, 4), make_sequence(range(9), 4)
    for token_id in range(9, 12):
        seq.append_token(token_id)
    manager.allocate(seq)
    manager.reset()
    second = seq.block_hashes[1]
    del seq.token_ids[9:]
    seq.restart()
    for token_id in (70, 71, 72):
        seq.append_token(token_id)
    manager.allocate(seq)
    assert manager.compute_hash([8, 70, 71, 72], second) in manager.hash_to_block_id
