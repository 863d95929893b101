"""What README and docs say is true: their Python runs, their links lead somewhere, their commands and tables agree.

The ```python blocks of one file are one program, run in order in one process. A block that is not meant to run says so:
```python no-run. The program keeps the line numbers of its file, so a traceback points into the document.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from monarch.core import setting_table

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install tox && .venv/bin/tox"
DEMO_COMMAND = "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/monarch demo"

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


def program(text: str) -> str:
    """The Python of a document with everything else blanked, or "" where it has none."""
    lines = [""] * (text.count("\n") + 2)
    for block in _FENCE.finditer(text):
        if block["info"].split() == ["python"]:
            first = text.count("\n", 0, block.start("body"))
            for offset, line in enumerate(block["body"].splitlines()):
                lines[first + offset] = line
    return "\n".join(lines) if any(lines) else ""


PROGRAMS = [document for document in DOCUMENTS if program(document.read_text(encoding="utf-8"))]


QUICK = {"README.md", "docs/calls.md", "docs/testing.md"}


@pytest.mark.parametrize(
    "document",
    [pytest.param(each, id=named(each), marks=() if named(each) in QUICK else pytest.mark.slow) for each in PROGRAMS],
)
def test_snippets_run(document, tmp_path):
    """They end with status 0, and print nothing to stderr."""
    script = tmp_path / f"{document.stem.lower()}_snippets.py"
    script.write_text(program(document.read_text(encoding="utf-8")), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=50, env=environment()
    )

    assert (result.returncode, result.stderr) == (0, "")


def environment() -> dict[str, str]:
    """That of a user, whose scripts find this checkout first, installed or not."""
    users = {name: value for name, value in os.environ.items() if name != "MONARCH_PRELOAD"}
    return {**users, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_between_documents_lead_somewhere(document):
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t and not t.startswith("#")]

    assert [t for t in targets if not (document.parent / t.split("#")[0]).exists()] == []


def test_ci_runs_the_command_that_readme_gives():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert DEMO_COMMAND in readme.splitlines()
    assert TEST_COMMAND in readme.splitlines()
    assert TEST_COMMAND in (ROOT / ".ci/run").read_text().splitlines()


def test_every_document_can_be_reached_from_readme():
    """By links, over other documents: what nobody links, nobody reads."""
    reached: set[Path] = set()
    to_read = [ROOT / "README.md"]
    while to_read:
        document = to_read.pop()
        reached.add(document)
        for target in re.findall(r"\]\(([^)\s]+\.md)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            linked = (document.parent / target).resolve()
            if linked not in reached and linked.exists():
                to_read.append(linked)

    assert [named(d) for d in DOCUMENTS if d not in reached] == []


def test_architecture_names_no_module_that_is_not_there():
    """In the last column of its tables, every `word` is one."""
    rows = [line for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    named = {word for row in rows for word in re.findall(r"`([\w.]+)`", row.split("|")[-2])}
    there = {file.stem for file in (ROOT / "monarch").rglob("*.py")} | {"supervision", "job"}

    assert len(named) > 50
    assert sorted(named - there - {f"monarch.{module}" for module in there}) == []


SETTINGS_DOCUMENT = ROOT / "docs" / "configuration.md"
_SETTINGS_TABLE = re.compile(r"(?<=`python -m tests.test_docs` -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)


def settings_table() -> str:
    """The table of all settings, in the order of `monarch.core.setting_table`."""
    rows = ["| setting | type | default | environment variable | meaning |", "|---|---|---|---|---|"]
    for setting in setting_table.SETTINGS.values():
        kind = ", ".join(f"`{c}`" for c in getattr(setting.kind, "choices", ())) or setting.kind.name
        default = repr(setting.default).replace("'", '"')
        variables = ", ".join(f"`{variable}`" for variable in setting.variables)
        rows.append(f"| `{setting.name}` | {kind} | `{default}` | {variables} | {setting.doc} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_settings_is_current():
    """`python -m tests.test_docs` writes it anew."""
    found = _SETTINGS_TABLE.search(SETTINGS_DOCUMENT.read_text(encoding="utf-8"))

    assert found is not None
    assert found[0] == settings_table()


if __name__ == "__main__":
    document = SETTINGS_DOCUMENT.read_text(encoding="utf-8")
    SETTINGS_DOCUMENT.write_text(_SETTINGS_TABLE.sub(lambda _: settings_table(), document), encoding="utf-8")
