"""How much memory can be had, told from files such as the kernel shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch.transports.available import available_bytes

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


class Machine:
    """Of which `free_mib` can be had, with a process in these control groups."""

    def __init__(self, root: Path, free_mib: int, *groups: str) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable: {free_mib << 10} kB\n")
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in groups))

    def write(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def group(self, path: str, limit_mib: int | None, used_mib: int, unused_mib: int | None = None) -> None:
        """Of version 2."""
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", "max" if limit_mib is None else limit_mib * MIB)
        self.write(f"{folder}/memory.current", used_mib * MIB)
        if unused_mib is not None:
            self.write(f"{folder}/memory.stat", f"file 1\ninactive_file {unused_mib * MIB}\nactive_file 2")

    def group_v1(self, path: str, limit_mib: int | None, used_mib: int, unused_mib: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", UNLIMITED_V1 if limit_mib is None else limit_mib * MIB)
        self.write(f"{folder}/memory.usage_in_bytes", used_mib * MIB)
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {unused_mib * MIB}")

    @property
    def available_mib(self) -> float:
        return available_bytes(self.root) / MIB


def test_without_groups_it_is_what_the_machine_has(tmp_path):
    assert Machine(tmp_path, 500).available_mib == 500
    assert available_bytes(tmp_path / "elsewhere") == 1 << 62
    assert 0 < available_bytes() < 1 << 62


def test_a_container_sees_its_own_group_at_the_top(tmp_path):
    machine = Machine(tmp_path, 500, "0::/")
    machine.group("", 300, 100)
    assert machine.available_mib == 200
    machine.group("", 300, 250)
    assert machine.available_mib == 50  # it is read each time
    machine.group("", 300, 301)
    assert machine.available_mib == 0
    machine.group("", None, 250)
    assert machine.available_mib == 500


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((400, 300, 200), 100), ((200, 300, 400), 100), ((None, 200, None), 100), ((None, None, None), 500)],
)
def test_the_tightest_of_nested_groups_counts(tmp_path, limits, expected):
    machine = Machine(tmp_path, 500, "0::/user.slice/job 7:x/step")
    for path, limit in zip(("user.slice", "user.slice/job 7:x", "user.slice/job 7:x/step"), limits, strict=True):
        machine.group(path, limit, 100)
    machine.group("user.slice/other", 100, 100)
    assert machine.available_mib == expected


@pytest.mark.parametrize("path", ["/docker/abc", "/../abc"])
def test_a_path_that_begins_outside_of_the_container(tmp_path, path):
    machine = Machine(tmp_path, 500, f"0::{path}")
    machine.group("", 300, 100)
    assert machine.available_mib == 200


def test_groups_of_version_1(tmp_path):
    machine = Machine(tmp_path, 500, "9:name=systemd:/job", "4:cpu,memory:/jobs/7", "3:cpuset:/other", "0::/job")
    machine.group_v1("", None, 400)
    machine.group_v1("jobs", 350, 300)
    machine.group_v1("jobs/7", 200, 50)
    machine.group_v1("job", 1, 1)
    machine.group_v1("other", 1, 1)
    assert machine.available_mib == 50
    machine.group_v1("jobs", 350, 300, unused_mib=60)
    assert machine.available_mib == 110


def test_memory_of_files_that_nobody_uses_is_free(tmp_path):
    machine = Machine(tmp_path, 500, "0::/job")
    machine.group("job", 300, 290, unused_mib=200)
    assert machine.available_mib == 210
    machine.write("proc/meminfo", f"MemAvailable: {100 << 10} kB")
    assert machine.available_mib == 100
