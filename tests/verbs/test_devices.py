"""Which device, port and GID is used, from tables and from a folder that looks like sysfs."""

from __future__ import annotations

import pytest

from monarch.errors import NotViable
from monarch.verbs.devices import Gid, Port, choose, ports

LOCAL_V1 = Gid(0, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1", "eth0")
LOCAL_V2 = Gid(1, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", "eth0")
V4_V1 = Gid(2, "0000:0000:0000:0000:0000:ffff:0a4d:0001", "IB/RoCE v1", "eth0")
V4_V2 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2", "eth0")
GLOBAL_V2 = Gid(5, "2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth0")


def port(*gids: Gid, device: str = "rxe0", number: int = 1, state: str = "ACTIVE", layer: str = "Ethernet") -> Port:
    return Port(device, number, state, layer, 0, gids)


@pytest.mark.parametrize(
    ("gids", "best"),
    [
        ((LOCAL_V1, LOCAL_V2, V4_V1, V4_V2, GLOBAL_V2), V4_V2),
        ((LOCAL_V1, LOCAL_V2, GLOBAL_V2), GLOBAL_V2),
        ((LOCAL_V2, V4_V1), V4_V1),
        ((LOCAL_V1, LOCAL_V2), LOCAL_V2),
        ((LOCAL_V1,), LOCAL_V1),
    ],
)
def test_routable_goes_before_link_local_and_v2_before_v1(gids, best):
    choice = choose([port(*gids)])

    assert choice.gid == best
    assert f"GID {best.index}" in choice.reason and f"the best of {len(gids)}" in choice.reason


def test_an_active_port_with_the_better_gid_is_chosen():
    found = [port(LOCAL_V2), port(V4_V2, device="rxe1", state="DOWN"), port(V4_V2, device="rxe2")]

    assert choose(found).port.device == "rxe2"


def test_the_first_of_equals_is_chosen():
    assert choose([port(V4_V2), port(V4_V2, device="rxe1")]).port.device == "rxe0"


@pytest.mark.parametrize(
    ("target", "expected"),
    [("nic:rxe1", ("rxe1", 1, 3)), ("nic:rxe1/2", ("rxe1", 2, 3)), ("nic:rxe0/1/1", ("rxe0", 1, 1))],
)
def test_a_target_has_the_last_word(target, expected):
    found = [port(LOCAL_V2, V4_V2), port(V4_V2, device="rxe1"), port(V4_V2, device="rxe1", number=2)]
    choice = choose(found, target)

    assert (choice.port.device, choice.port.number, choice.gid and choice.gid.index) == expected
    assert target in choice.reason


def test_infiniband_needs_no_gid():
    choice = choose([Port("mlx5_0", 1, "ACTIVE", "InfiniBand", 17)])

    assert choice.gid is None
    assert "LID 17" in choice.reason


@pytest.mark.parametrize(
    ("found", "target", "reason"),
    [
        ([], "", "no RDMA device"),
        ([port(V4_V2, state="DOWN")], "", "rxe0 port 1 is DOWN: is its cable in"),
        ([port()], "", "rxe0 port 1 has no GID: has its network interface an address"),
        ([port(V4_V2)], "nic:rxe0/1/7", "rxe0 port 1 has no GID 7"),
        ([port(V4_V2)], "nic:mlx5_0", "rxe0 port 1 is not what 'nic:mlx5_0' asks for"),
        ([port(V4_V2)], "rxe0", "it can be nic:DEVICE"),
        ([port(V4_V2)], "gpu:1", "it can be nic:DEVICE"),
    ],
)
def test_a_refusal_says_why(found, target, reason):
    with pytest.raises(NotViable) as refused:
        choose(found, target)

    assert reason in str(refused.value)


def test_sysfs_is_read_with_its_holes(tmp_path):
    folder = tmp_path / "rxe0" / "ports" / "1"
    for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (folder / name).mkdir(parents=True)
    (folder / "state").write_text("4: ACTIVE\n")
    (folder / "link_layer").write_text("Ethernet\n")
    (folder / "lid").write_text("0x0\n")
    for index, gid in ((0, LOCAL_V2.gid), (1, "0000:" * 7 + "0000"), (10, V4_V2.gid)):
        (folder / "gids" / str(index)).write_text(gid + "\n")
    for index in (0, 10):
        (folder / "gid_attrs/types" / str(index)).write_text("RoCE v2\n")
    (folder / "gid_attrs/ndevs" / "10").write_text("eth0\n")

    (found,) = ports(tmp_path)
    assert (found.device, found.number, found.state, found.link_layer, found.lid) == (
        "rxe0",
        1,
        "ACTIVE",
        "Ethernet",
        0,
    )
    assert [(gid.index, gid.interface) for gid in found.gids] == [(0, ""), (10, "eth0")]
    assert str(found.gids[1]) == "10.77.0.1 (RoCE v2, eth0)"
    assert ports(tmp_path / "nothing") == []
