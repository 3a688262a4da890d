"""Measures of the core that a reader feels, held where they are: names, chains, circles of imports and sentences."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import asyncflow_sdk

pytestmark = pytest.mark.fast
ROOT = Path(asyncflow_sdk.__file__).parent
CORE = ("types", "interfaces", "plugins", "algorithms", "memory", "wire", "ledger", "queue", "weights")
TREES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for package in CORE
    for path in sorted((ROOT / package).rglob("*.py"))
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
RELATIVE = re.compile(r"\b(that|which|what|whatever|who|whom|whose|whoever|those|such as|so that)\b", re.IGNORECASE)
"""Words of sentences that have to be read twice, if there are many of them."""


def nodes(*kinds: type) -> Iterator[ast.AST]:
    return (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, kinds))


def test_modules_are_named_by_nouns_and_classes_by_one_name_each() -> None:
    assert [path for path in TREES if path.endswith("ing.py")] == []
    names = Counter(node.name for node in nodes(ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_chains_of_inheritance_are_short() -> None:
    bases = {node.name: [ast.unparse(base).split("[")[0] for base in node.bases] for node in nodes(ast.ClassDef)}

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in bases[name] if base in bases), default=0)

    assert {name: depth(name) for name in bases if depth(name) > 3} == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports in functions and under TYPE_CHECKING count, too."""
    graph = grimp.build_graph("asyncflow_sdk")
    within = [name for name in graph.modules if name.split(".")[1:2] and name.split(".")[1] in CORE]
    imported = {name: graph.find_modules_directly_imported_by(name) & set(within) for name in within}
    TopologicalSorter(imported).prepare()  # raises CycleError, with the circle


def test_docstrings_are_there_and_plain() -> None:
    public = [node for node in nodes(*FUNCTION) if not node.name.startswith("_")]
    bare = [node.name for node in public if ast.get_docstring(node) is None]
    assert len(bare) <= 0.05 * len(public), bare
    texts = [ast.get_docstring(node) or "" for node in nodes(ast.Module, ast.ClassDef, *FUNCTION)]
    prose = re.sub(r"``[^`]*``|`[^`]*`", " ", " ".join(texts))
    words = len(re.findall(r"[A-Za-z][A-Za-z'-]*", prose))
    assert len(RELATIVE.findall(prose)) <= 0.015 * words
