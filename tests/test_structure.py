"""Measures of the code that a reader feels, held where they are: names, chains, circles of imports and sentences."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import asyncflow_sdk
from asyncflow_sdk.errors import AsyncFlowError

pytestmark = pytest.mark.fast
ROOT = Path(asyncflow_sdk.__file__).parent
ADAPTERS = sorted(path.parent for path in (Path(__file__).parent.parent / "adapters").glob("*/__init__.py"))
TREES = {path: ast.parse(path.read_text()) for root in (ROOT, *ADAPTERS) for path in sorted(root.rglob("*.py"))}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
RELATIVE = re.compile(r"\b(that|which|what|whatever|who|whom|whose|whoever|those|such as|so that)\b", re.IGNORECASE)
"""Words of sentences that have to be read twice, if there are many of them."""


def nodes(*kinds: type, under: Path = Path("/")) -> Iterator[ast.AST]:
    trees = [tree for path, tree in TREES.items() if path.is_relative_to(under)]
    return (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))


def test_modules_are_named_by_nouns_and_classes_by_one_name_each() -> None:
    assert [str(path) for path in TREES if path.name.endswith("ing.py")] == []
    names = Counter(node.name for node in nodes(ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_chains_of_inheritance_are_short() -> None:
    bases = {node.name: [ast.unparse(base).split("[")[0] for base in node.bases] for node in nodes(ast.ClassDef)}

    def chain(name: str) -> list[str]:
        return [name, *max((chain(base) for base in bases[name] if base in bases), key=len, default=[])]

    chains = [chain(name) for name in bases]
    # errors.py draws a tree of three levels, and a module may add one for its own use
    assert [each for each in chains if len(each) > (4 if each[-1] == AsyncFlowError.__name__ else 3)] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports in functions and under TYPE_CHECKING count, too."""
    graph = grimp.build_graph("asyncflow_sdk", *(path.name for path in ADAPTERS))
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imported).prepare()  # raises CycleError, with the circle


def test_docstrings_are_there_and_plain() -> None:
    public = [node for node in nodes(*FUNCTION, under=ROOT) if not node.name.startswith("_")]
    bare = [node.name for node in public if ast.get_docstring(node) is None]
    assert len(bare) <= 0.05 * len(public), bare
    texts = [ast.get_docstring(node) or "" for node in nodes(ast.Module, ast.ClassDef, *FUNCTION)]
    prose = re.sub(r"``[^`]*``|`[^`]*`", " ", " ".join(texts))
    words = len(re.findall(r"[A-Za-z][A-Za-z'-]*", prose))
    assert len(RELATIVE.findall(prose)) <= 0.015 * words
