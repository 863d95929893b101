"""Scripts in the style of torchrun, over a mesh."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import ActorError, this_host
from monarch.mesh.shape import Extent, Point
from monarch.spmd import SPMDActor, environment, setup_torch_elastic_env, setup_torch_elastic_env_async
from monarch.testing import TestClient, fresh_client
from tests.mesh.actors import Worker

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with fresh_client("shm") as client:
        yield client


@pytest.fixture(scope="module")
def procs(client: TestClient) -> Any:
    return this_host().spawn_procs({"nodes": 2, "gpus": 2})


@pytest.mark.parametrize(
    ("sizes", "rank", "found"),
    [
        ({"hosts": 2, "gpus": 4}, 5, ("5", "8", "1", "4", "1", "2")),
        ({"gpus": 3}, 2, ("2", "3", "2", "3", "0", "1")),
        ({"a": 2, "b": 2, "c": 2}, 7, ("7", "8", "1", "2", "3", "4")),
        ({}, 0, ("0", "1", "0", "1", "0", "1")),
    ],
)
def test_the_last_dimension_is_the_processes_of_a_node(sizes: dict[str, int], rank: int, found: tuple[str]) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    env = environment(Point(rank, Extent(list(sizes), list(sizes.values()))), "host", 29500)
    assert tuple(env[name] for name in names) == found
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["ROLE_NAME"]) == ("host", "29500", "rank")


def _seen(procs: Any, name: str) -> list[str | None]:
    return list(procs.spawn("w", Worker).environ.call(name).get(LIMIT_S).values())


def test_every_process_gets_its_rank_and_one_place_to_meet(procs: Any) -> None:
    setup_torch_elastic_env(procs)
    assert _seen(procs, "RANK") == ["0", "1", "2", "3"]
    assert len(set(_seen(procs, "MASTER_PORT"))) == len(set(_seen(procs, "MASTER_ADDR"))) == 1
    asyncio.run(setup_torch_elastic_env_async(procs, "here", 1234))
    assert set(_seen(procs, "MASTER_PORT")) == {"1234"}


def test_an_address_needs_a_port(procs: Any) -> None:
    with pytest.raises(AssertionError, match="both"):
        setup_torch_elastic_env(procs, master_addr="here")


def test_a_script_runs_as_the_main_program(procs: Any, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, beside
            if __name__ == "__main__":
                open(f"{sys.argv[1]}.{os.environ['RANK']}", "w").write(beside.WORD)
                sys.exit(0)
            """
        )
    )
    spmd = procs.spawn("spmd", SPMDActor)
    done = spmd.main.call("127.0.0.1", 1, [str(script), str(tmp_path / "out")]).get(LIMIT_S)
    assert list(done.values()) == [True] * 4
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(4)] == ["found"] * 4


def test_what_cannot_run_is_an_error(procs: Any, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    spmd = procs.slice(nodes=0, gpus=0).spawn("spmd", SPMDActor)
    for arguments, match in (([], "nothing to run"), (["-m"], "nothing to run"), ([str(script)], "status 3")):
        with pytest.raises(ActorError, match=match):
            spmd.main.call_one("127.0.0.1", 1, arguments).get(LIMIT_S)


@pytest.mark.slow
@pytest.mark.torch
def test_a_ddp_script_under_gloo_runs_unchanged_over_four_processes(procs: Any, tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch, torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel

            def main():
                dist.init_process_group("gloo")
                torch.manual_seed(dist.get_rank())
                model = DistributedDataParallel(torch.nn.Linear(4, 2))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for step in range(3):
                    optimizer.zero_grad()
                    model(torch.randn(8, 4)).sum().backward()
                    optimizer.step()
                total = torch.ones(1)
                dist.all_reduce(total)
                weights = [torch.zeros(2, 4) for _ in range(dist.get_world_size())]
                dist.all_gather(weights, model.module.weight.data)
                assert total.item() == 4 and all(torch.equal(each, weights[0]) for each in weights)
                dist.destroy_process_group()
                open(f"{sys.argv[1]}.{os.environ['RANK']}", "w").write("equal")

            if __name__ == "__main__":
                main()
            """
        )
    )
    spmd = procs.spawn("spmd", SPMDActor)
    host, port = spmd.slice(nodes=0, gpus=0).get_host_port.call_one().get(LIMIT_S)
    spmd.main.call(host, port, [str(script), str(tmp_path / "out")]).get(55)
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(4)] == ["equal"] * 4
