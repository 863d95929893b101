"""Where the secret comes from, and when there must be one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from monarch import cli
from monarch.mesh.trust import NoSecret, new_secret, own_secret, shared_secret, write_secret

FAR, NEAR = "tcp://192.0.2.1:1", "tcp://127.0.0.1:1"


def test_a_secret_comes_from_a_file_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    assert write_secret(str(path), "f" * 64)
    monkeypatch.setenv("MONARCH_SECRET", "v" * 64)
    assert shared_secret(FAR) == b"v" * 64
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))
    assert shared_secret(FAR) == shared_secret(NEAR) == b"f" * 64


def test_without_a_secret_only_this_host_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoSecret, match="monarch secret new"):
        shared_secret(FAR)
    own = shared_secret(NEAR)
    assert own == shared_secret("ipc:///tmp/x") and len(own) >= 32
    monkeypatch.setenv("MONARCH_INSECURE", "1")
    assert shared_secret(FAR) == shared_secret(f"{NEAR}@tcp://0.0.0.0:1") != own
    assert shared_secret(NEAR) == shared_secret(f"{FAR}@{NEAR}") == own


def test_a_program_has_the_secret_of_its_user_on_this_host_and_beyond_it_one_of_its_own() -> None:
    assert own_secret(NEAR) == own_secret("shm://") == shared_secret(NEAR)
    assert len({own_secret(FAR), own_secret(FAR), shared_secret(NEAR)}) == 3


@pytest.mark.parametrize(("content", "mode"), [("", 0o600), ("short", 0o600), ("f" * 64, 0o644)])
def test_a_users_secret_that_is_none_any_more_is_used_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, mode: int
) -> None:
    path = tmp_path / "monarch-secret"
    path.write_text(content)
    path.chmod(mode)
    joined = os.path.join
    monkeypatch.setattr("os.path.join", lambda *parts: str(path) if parts[1:] == (path.name,) else joined(*parts))

    with pytest.raises(NoSecret, match=str(path)):
        shared_secret(NEAR)
    assert len({own_secret(NEAR), own_secret(NEAR), content.encode()}) == 3


def test_insecurity_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MONARCH_INSECURE", "1")
    shared_secret(FAR)
    assert "whoever can connect can run code here" in caplog.text


@pytest.mark.parametrize("content", ["", "short"])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    path = tmp_path / "secret"
    write_secret(str(path), content)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))
    with pytest.raises(NoSecret, match="can be guessed"):
        shared_secret(NEAR)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    write_secret(str(path), new_secret())
    path.chmod(0o640)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))
    with pytest.raises(NoSecret, match="chmod 600"):
        shared_secret(NEAR)


def test_a_file_that_is_not_there_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SECRET_FILE", "/nowhere/secret")
    with pytest.raises(NoSecret, match="/nowhere/secret"):
        shared_secret(NEAR)


def test_the_command_makes_a_file_for_its_owner_alone_and_never_a_second(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        assert cli.main(["secret", "new", str(path)]) == 0
    finally:
        os.umask(before)
    first = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(first) == 64
    assert cli.main(["secret", "new", str(path)]) == 1
    assert path.read_text() == first and os.listdir(tmp_path) == ["secret"]


def test_the_command_prints_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["secret", "new"]) == 0
    assert len(capsys.readouterr().out.strip()) == 64
