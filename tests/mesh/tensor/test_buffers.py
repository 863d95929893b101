"""Memory of results is used again, when nobody has it any more and not before."""

from __future__ import annotations

import torch

from monarch.mesh.tensor import buffers
from monarch.mesh.tensor.buffers import Buffers

CPU = torch.device("cpu")
COUNT = (1 << 20) + 3


def test_memory_is_used_again_once_the_last_view_is_gone():
    pool = Buffers()
    first = pool.empty(COUNT, torch.float32, CPU)
    place, view = first.data_ptr(), first[1:].view(-1, 2)
    del first
    second = pool.empty(COUNT, torch.float32, CPU)
    assert second.data_ptr() != place
    view.fill_(3)
    del view
    third = pool.empty(COUNT, torch.float32, CPU)
    assert third.data_ptr() == place
    assert third.shape == (COUNT,) and third.untyped_storage().nbytes() == COUNT * 4


def test_small_ones_are_of_torch():
    assert Buffers().empty(3, torch.int64, CPU).shape == (3,)


def test_no_more_than_so_much_is_kept(monkeypatch):
    monkeypatch.setattr(buffers, "KEPT_BYTES", 8 << 20)
    pool = Buffers()
    held = [pool.empty(COUNT, torch.float32, CPU) for _ in range(5)]
    held.clear()
    assert sum(map(len, pool._unused)) <= 8 << 20
