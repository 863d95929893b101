"""A fork of a process with links over nng: what it collects of them must not call nng, which hangs or aborts there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import gc, os, select, sys
gc.disable()
from monarch.transports import registry
from tests.transports.drive import connected
with connected(registry.get("tcp")) as links:
    if sys.argv[1] == "open":
        pid = os.fork()
if sys.argv[1] == "closed":
    pid = os.fork()
if not pid:
    del links
    gc.collect()
    os._exit(0)
ended, _, _ = select.select([os.pidfd_open(pid)], [], [], 20)
if not ended:
    os.kill(pid, 9)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("links", ["open", "closed"])
def test_a_fork_collects_links_that_are(links):
    done = subprocess.run(
        [sys.executable, "-c", CODE, links], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=50
    )

    assert (done.returncode, done.stderr) == (0, "")
