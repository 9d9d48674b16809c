"""The documentation builds without a warning, and says what the code says."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines import apex, dqn, episodic_memory, impact, impala, ppo, r2d2, sac, vmpo
from pipelines.experiment import RunArgs
from pipelines.tools import collect, evaluate, export

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # the theme's notice about its own future
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING" not in said
    pages = [page.relative_to(DOCS) for page in DOCS.rglob("*.md")]
    assert len(pages) > 25
    for page in pages:
        name = "index" if page.stem == "README" else page.stem
        assert (tmp_path / page.with_name(f"{name}.html")).is_file(), page
    reference = (tmp_path / "reference" / "stores.html").read_text()
    assert 'id="clusterenv.ReplayStore.commit"' in reference
    assert ":class:" not in reference
    for page in tmp_path.rglob("*.html"):  # a reader without a network sees all of it
        assert not re.search(r'<(script|link rel="stylesheet)[^>]*"https?://', page.read_text())


def test_files_on_the_architecture_page_exist() -> None:
    page = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", page))
    assert len(named) > 40
    for name in named:
        assert any((ROOT / root / name).exists() for root in (".", "clusterenv")), name
    folders = re.findall(r"^\| `([a-z/]+)/` \|", page, re.MULTILINE)
    packages = {path.parent.name for path in (ROOT / "clusterenv").glob("*/__init__.py")}
    assert {folder.split("/")[0] for folder in folders} == packages | {"pipelines"}
    around = {path.parent.name for path in (ROOT / "pipelines").glob("*/__init__.py")}
    assert {
        folder.removeprefix("pipelines/") for folder in folders if "pipelines/" in folder
    } == around


def messages() -> Iterator[str]:
    """Yield every string of the source, with ``…`` for each value in it."""
    for file in (*(ROOT / "clusterenv").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield " ".join("".join(map(str, parts)).split())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield " ".join(re.sub(r"%(\.\d)?[sdgrf]", "…", node.value).split())


def test_messages_in_troubleshooting_are_those_of_the_source() -> None:
    quoted = re.findall(r"```text\n(.*?)```", (DOCS / "troubleshooting.md").read_text(), re.DOTALL)
    assert len(quoted) > 20
    known = list(messages())
    for quote in quoted:
        text = " ".join(quote.split())
        assert any(text in message for message in known), text


@pytest.mark.parametrize(
    ("heading", "kind", "base"),
    [
        ("Options of every learner", RunArgs, None),
        ("train ppo", ppo.Args, RunArgs),  # what is new, or has another default
        ("train dqn", dqn.Args, RunArgs),
        ("train apex", apex.Args, dqn.Args),
        ("train r2d2", r2d2.Args, RunArgs),
        ("train impala", impala.Args, RunArgs),
        ("train episodic_memory", episodic_memory.Args, impala.Args),
        ("train impact", impact.Args, impala.Args),
        ("train vmpo", vmpo.Args, RunArgs),
        ("train sac", sac.Args, RunArgs),
        ("evaluate", evaluate.Args, None),
        ("export", export.Args, None),
        ("collect", collect.Args, None),
    ],
)
def test_the_command_line_page_has_every_option(heading: str, kind: Any, base: Any) -> None:
    text = (DOCS / "command-line.md").read_text()
    section = re.search(rf"^### {heading}\n(.*?)^##", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    listed = re.findall(r"^\| `--([\w-]+)` \| ([^|]*) \|", section[1], re.MULTILINE)
    known = {field.name: field.default for field in dataclasses.fields(base)} if base else {}
    fields = [field for field in dataclasses.fields(kind) if "Positional" not in str(field.type)]
    further = [field for field in fields if known.get(field.name, known) != field.default]
    assert [name for name, _ in listed] == [each.name.replace("_", "-") for each in further]
    for (name, default), field in zip(listed, further, strict=True):
        if isinstance(field.default, bool):
            assert default == ("on" if field.default else "off"), name
        elif isinstance(field.default, int):
            assert default == f"{field.default:,}", name
        elif isinstance(field.default, float):
            assert default == f"`{field.default}`", name
