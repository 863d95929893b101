"""The public types, as mypy sees them from a user's program. `tox -e typing` runs this; elsewhere mypy is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed here; tox -e typing runs this")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def verdict(tmp_path_factory):
    """What `mypy --strict` says about tests/typing/public_types.py, as (status, output)."""
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "tests/typing/public_types.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.timeout(300)
def test_types_are_what_the_file_asserts(verdict):
    """Every `assert_type` holds, and every line that is wrong on purpose is an error."""
    status, output = verdict

    assert status == 0, output


def test_awaiting_call_one_gives_the_return_type(verdict):
    _, output = verdict

    assert 'Revealed type is "int"' in output.replace("builtins.", "")
