"""What processes find imported at their start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monarch.actor import Actor, default_bootstrap_cmd, endpoint, this_host
from monarch.testing import fresh_client


class Importer(Actor):
    @endpoint
    def has(self, module: str) -> bool:
        return module in sys.modules

    @endpoint
    def train(self) -> tuple[float, int, float]:
        """What needs threads and processes of torch's: a gradient, the number of threads, the sum over a DataLoader."""
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        weights = torch.ones(300, 300, requires_grad=True)
        (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
        assert weights.grad is not None
        loader = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=4, num_workers=2)
        return weights.grad[0, 0].item(), torch.get_num_threads(), sum(batch.sum().item() for (batch,) in loader)


def test_the_modules_of_the_setting_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_the_user.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with fresh_client("ipc", preload=["wave", "module_of_the_user"]):
        importer = this_host().spawn_procs().spawn("importer", Importer)
        assert importer.has.call_one("wave").get(20)
        assert importer.has.call_one("module_of_the_user").get(20)
    assert "module_of_the_user" not in sys.modules


def test_numpy_is_preloaded_where_the_driver_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy  # noqa: F401

    with fresh_client("ipc", preload="auto"), monkeypatch.context() as patched:
        patched.delitem(sys.modules, "torch", raising=False)
        importer = this_host().spawn_procs().spawn("importer", Importer)
        assert importer.has.call_one("numpy").get(20)
        assert not importer.has.call_one("torch").get(20)


@pytest.mark.slow
@pytest.mark.torch
def test_torch_is_preloaded_where_the_driver_has_it_and_works_in_each_process() -> None:
    import torch  # noqa: F401

    with fresh_client("ipc", preload="auto"):
        importer = this_host().spawn_procs({"n": 2}).spawn("importer", Importer)
        assert list(importer.has.call("torch").get(60).values()) == [True, True]
        for gradient, _, total in importer.train.call().get(60).values():
            assert (gradient, total) == (600.0, 32.0)
        command = default_bootstrap_cmd().with_env({"OMP_NUM_THREADS": "3"})
        narrow = this_host().spawn_procs(bootstrap_command=command).spawn("narrow", Importer)
        assert narrow.has.call_one("torch").get(60)
        assert narrow.train.call_one().get(60)[1] == 3


@pytest.mark.slow
@pytest.mark.torch
def test_torch_is_not_loaded_for_programs_that_import_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    with fresh_client("ipc", preload="auto"):
        with monkeypatch.context() as patched:
            patched.delitem(sys.modules, "torch")
            patched.delitem(sys.modules, "numpy")
            this_host().spawn_procs().initialized.get(20)
        assert sys.modules["torch"] is torch
        importer = this_host().spawn_procs().spawn("importer", Importer)
        assert not importer.has.call_one("torch").get(20)
