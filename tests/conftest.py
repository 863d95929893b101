"""What every test starts from: no setting of the person who runs the tests leaks in, and hardware decides skips.

`MONARCH_TRANSPORT` is let through on purpose: `MONARCH_TRANSPORT=inproc pytest` runs the suite over that transport. So
is `MONARCH_RING`: with 0, it runs without the compiled part. Where there is none, it is 0, so that programs under test
print no warning of that.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys

import hypothesis
import pytest

_KEPT = {"MONARCH_RDMA_BINDING", "MONARCH_RING", "MONARCH_TRANSPORT"}

for _name in [name for name in os.environ if name.startswith("MONARCH_") and name not in _KEPT]:
    del os.environ[_name]
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a hundred interpreters would compile what they import, each its own
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell gives it to what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs under test would inherit it
if importlib.util.find_spec("monarch._compiled") is None:
    os.environ["MONARCH_RING"] = "0"
os.environ["MONARCH_PRELOAD"] = "none"  # else tests that import torch make it slow to start the processes of later ones

# A loaded machine must not fail a property for being slow; the same examples each time where nobody looks at a failure.
# `-m "slow or hypothesis" --hypothesis-profile thorough` is for those who have time.
for _profile, _examples, _steps in (("monarch", 20, 30), ("thorough", 100, 50)):
    hypothesis.settings.register_profile(
        _profile,
        deadline=None,
        max_examples=_examples,
        stateful_step_count=_steps,
        derandomize="CI" in os.environ,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("monarch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=200, help="rounds of tests/chaos")
    parser.addoption("--seed", type=int, default=None, help="seed of tests/chaos; a random one where not given")


def _missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here, or None where they can."""
    if marker == "torch":
        return None if importlib.util.find_spec("torch") else "torch is not installed"
    if marker == "rdma":
        devices = os.listdir("/sys/class/infiniband") if os.path.isdir("/sys/class/infiniband") else []
        return None if devices or "RDMA_VM" in os.environ else "no RDMA device: /sys/class/infiniband is empty"
    if marker == "gpu":
        return None if os.path.exists("/dev/nvidiactl") else "no CUDA device: /dev/nvidiactl is missing"
    if marker == "cable":
        return None if "RDMA_VM" in os.environ else "no cable that may be pulled: RDMA_VM is not set"
    raise ValueError(marker)


def pytest_collection_finish() -> None:
    """Who collects garbage in a test need not look at all modules and tests: 0.2 s each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a device or a package that is not here, with the reason."""
    reasons = {marker: _missing(marker) for marker in ("torch", "cable", "rdma", "gpu")}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
