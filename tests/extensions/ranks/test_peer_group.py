"""Who uses peer memory: all ranks, or none."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import FileStore

from nanovllm.extensions.ranks import peer_group
from nanovllm.extensions.ranks.peer_group import PeerGroup
from nanovllm.kernels.layernorm import add_rms_norm


@pytest.mark.parametrize("fails_on", ["access", "mapping"])
def test_where_one_rank_cannot_map_the_others_memory_all_compute_as_without(tmp_path, monkeypatch, fails_on):
    closed, sizes = [], dict(max_num_seqs=4, torch_dtype=torch.float32)

    def shared_buffer(num_words, rank, device, gather):
        is_mapped = fails_on != "mapping" or rank == 0
        return SimpleNamespace(is_mapped=is_mapped, close=lambda: closed.append(rank))

    monkeypatch.setattr(peer_group, "SharedBuffer", shared_buffer)
    monkeypatch.setattr(peer_group, "has_peer_access", lambda config: config.has_access)
    rows, residual, weight = torch.randn(2, 3, 8), torch.randn(3, 8), torch.rand(8)

    deadline = time.monotonic() + 10

    def check() -> None:
        assert time.monotonic() < deadline

    def compute(rank: int) -> list:
        config = SimpleNamespace(**sizes, has_access=fails_on != "access" or rank == 0)
        group = PeerGroup(rank, 2, FileStore(str(tmp_path / "store")), check, config)
        group.connect(torch.device("cpu"))
        summed = group.all_reduce(rows[rank].clone())
        normed, _ = group.all_reduce_add_rms_norm(rows[rank].clone(), residual.clone(), weight, 1e-6)
        best = group.best_token(torch.tensor([1.0, 2.0 - rank]), torch.tensor([7, 3]) + rank)
        group.abort()
        assert group.peers is None and group.backend is not None
        group.close()
        return [summed, normed, best]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compute, range(2)))
    expected = rows[0] + rows[1]
    normed, _ = add_rms_norm(expected.clone(), residual.clone(), weight, 1e-6)
    for found in results:
        for each, right in zip(found, [expected, normed, torch.tensor([7, 3])], strict=True):
            torch.testing.assert_close(each, right)
    assert sorted(closed) == ([0, 1] if fails_on == "mapping" else [])


def test_a_stand_in_for_one_rank_gives_back_what_it_gets_and_for_several_has_memory():
    config = SimpleNamespace(tensor_parallel_size=1, max_num_seqs=4, torch_dtype=torch.bfloat16)
    x = torch.randn(2, 8)
    assert peer_group.stand_in(config, 0).all_reduce(x) is x
    config.tensor_parallel_size = 2
    group = peer_group.stand_in(config, 1)
    assert (group.rank, group.size, group.peers.rank, group.peers.size) == (1, 2, 1, 2)
