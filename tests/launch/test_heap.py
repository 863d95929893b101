"""The holes of the heap, before and after they are filled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from monarch.launch import heap

HOLES = """
import json
from monarch.launch import heap
objects = [bytes(size) for size in range(15, 450) for _ in range(200)]
ids = {id(each) for each in objects}
del objects[::3]
heap.fill_holes()
new = [bytes(size) for size in range(15, 450) for _ in range(20)]
print(json.dumps([len(new), sum(id(each) in ids for each in new)]))
"""


def told(program: str, **env: str) -> Any:
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_new_objects_do_not_go_into_old_holes() -> None:
    made, in_holes = told(HOLES)
    assert in_holes < made / 100


def test_an_allocator_without_pools_is_left_alone_soon() -> None:
    fillers = told(
        "from monarch.launch import heap; heap.fill_holes(); print(len(heap._fillers))", PYTHONMALLOC="malloc"
    )
    assert fillers == heap._MOST_BLOCKS
