"""Budgets for the measures felt by a reader: size, owners, names, chains, circles of imports, sentences.

A change may lower a budget. To raise one, write a page in docs/adr, and name the code that leaves for it.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import numpy as np
import pytest

import asyncflow_sdk
from asyncflow_sdk.errors import AsyncFlowError

pytestmark = pytest.mark.fast
CLONE = Path(__file__).parent.parent
ROOT = CLONE / "asyncflow_sdk"
ADAPTERS = sorted(path.parent for path in (CLONE / "adapters").glob("*/__init__.py"))
CORE = ("types", "interfaces", "plugins", "algorithms", "memory", "wire", "ledger", "queue", "weights")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
RELATIVE = re.compile(r"\b(that|which|what|whatever|who|whom|whose|whoever|those|such as|so that)\b", re.IGNORECASE)
"""Words of sentences that have to be read twice, if there are many of them."""
NOTE = re.compile(r"``[\w*., `]+``: +(of|its|their|by|as|for|in|to|from|with|at|on)\b", re.IGNORECASE)
"""A parameter's note without a noun."""
MAX_SIZE = {  # lines, files
    "asyncflow_sdk": (643, 5),
    "asyncflow_sdk/algorithms": (688, 6),
    "asyncflow_sdk/cli": (5_058, 26),
    "asyncflow_sdk/interfaces": (1_990, 13),
    "asyncflow_sdk/ledger": (7_047, 28),
    "asyncflow_sdk/memory": (1_422, 6),
    "asyncflow_sdk/plugins": (576, 4),
    "asyncflow_sdk/queue": (6_431, 28),
    "asyncflow_sdk/testing": (8_733, 46),
    "asyncflow_sdk/types": (2_092, 15),
    "asyncflow_sdk/weights": (4_441, 19),
    "asyncflow_sdk/wire": (3_208, 14),
    "asyncflow_sdk/workflow": (12_914, 48),
    "adapters/asyncflow_deepspeed": (817, 8),
    "adapters/asyncflow_fsdp": (405, 6),
    "adapters/asyncflow_http": (523, 6),
    "adapters/asyncflow_sglang": (1_501, 16),
    "adapters/asyncflow_torch": (7_174, 52),
    "adapters/asyncflow_vllm": (1_702, 16),
    "contrib/asyncflow_accelerate": (245, 4),
    "contrib/asyncflow_blocks": (1_018, 9),
    "contrib/asyncflow_ctranslate2": (241, 4),
    "contrib/asyncflow_mlflow": (226, 4),
    "contrib/asyncflow_mooncake": (478, 5),
    "contrib/asyncflow_otel": (237, 4),
    "contrib/asyncflow_prometheus": (401, 4),
    "contrib/asyncflow_ray": (711, 9),
    "contrib/asyncflow_sandbox": (782, 7),
    "contrib/asyncflow_slurm": (455, 6),
    "contrib/asyncflow_tensorboard": (160, 4),
    "contrib/asyncflow_trackio": (110, 4),
    "contrib/asyncflow_wandb": (169, 4),
    "benchmarks": (7_181, 77),
    "tests, shared": (7_697, 63),
}
"""By package."""
MAX_CORE = (27_895, 133)
"""Of the packages of CORE together."""
MAX_COUNT = {
    "public names": 97,
    "functions with more than ten parameters": 12,
    "assignments into other objects": 125,
    "assignments into other objects, of the core": 2,
    "comments that stop the formatter": 114,
    "notes of parameters without a noun": 250,
    "public functions without a docstring": 54,
    "relative words in 100 of the code": 0.8,
    "relative words in 100 of the tests": 4.66,
}


@functools.cache
def modules(*roots: Path) -> dict[Path, list[ast.AST]]:
    """The nodes of each module below some folders."""
    return {
        path: list(ast.walk(ast.parse(path.read_text()))) for root in roots for path in sorted(root.rglob("*.py"))
    }


def code() -> dict[Path, list[ast.AST]]:
    """The SDK and its adapters."""
    return modules(ROOT, *ADAPTERS)


def nodes(*kinds: type, under: Path = Path("/")) -> Iterator[ast.AST]:
    found = [module for path, module in code().items() if path.is_relative_to(under)]
    return (node for module in found for node in module if isinstance(node, kinds))


def sizes() -> dict[str, tuple[int, int]]:
    """Lines and files of each package, and of the shared modules of the tests."""
    folders = (
        *(path.parent for path in CLONE.glob("a*/*/__init__.py")),
        *CLONE.glob("contrib/*/"),
        CLONE / "benchmarks",
    )
    packages = {str(folder.relative_to(CLONE)): folder.rglob("*.py") for folder in folders}
    packages["asyncflow_sdk"] = ROOT.glob("*.py")
    packages["tests, shared"] = (path for path in CLONE.glob("tests/**/*.py") if not path.name.startswith("test_"))
    lines = {
        name: [path.read_text().count("\n") for path in files if "templates" not in path.parts]
        for name, files in packages.items()
    }
    return {name: (sum(counts), len(counts)) for name, counts in lines.items()}


def parameters(function: ast.AST) -> int:
    given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return sum(each.arg not in ("self", "cls") for each in given)


def foreign(target: ast.AST) -> bool:
    """True if an assignment writes an attribute, or an item of one, of an object other than ``self``."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(map(foreign, target.elts))
    while isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute) and getattr(target.value, "id", "") not in ("self", "cls")


def docstrings(found: Iterable[list[ast.AST]]) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, *FUNCTION)
    return [ast.get_docstring(node) or "" for module in found for node in module if isinstance(node, kinds)]


def relative_words(texts: Iterable[str]) -> float:
    """Relative words in 100 words of texts."""
    text = re.sub(r"``[^`]*``|`[^`]*`", " ", " ".join(texts))
    return round(100 * len(RELATIVE.findall(text)) / len(re.findall(r"[A-Za-z][A-Za-z'-]*", text)), 2)


def counts() -> dict[str, float]:
    assignments = [
        (path.parent, target)
        for path, module in code().items()
        for node in module
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target in getattr(node, "targets", None) or [node.target]
        if foreign(target)
    ]
    core = {ROOT, *(ROOT / name for name in CORE)}
    texts = docstrings(code().values())
    public = [node for node in nodes(*FUNCTION, under=ROOT) if not node.name.startswith("_")]
    return {
        "public names": len(asyncflow_sdk.__all__),
        "functions with more than ten parameters": sum(parameters(node) > 10 for node in nodes(*FUNCTION)),
        "assignments into other objects": len(assignments),
        "assignments into other objects, of the core": sum(
            folder == ROOT or not core.isdisjoint({folder, *folder.parents} - {ROOT}) for folder, _ in assignments
        ),
        "comments that stop the formatter": sum(path.read_text().count("# fmt: skip") for path in code()),
        "notes of parameters without a noun": sum(len(NOTE.findall(text)) for text in texts),
        "public functions without a docstring": sum(ast.get_docstring(node) is None for node in public),
        "relative words in 100 of the code": relative_words(texts),
        "relative words in 100 of the tests": relative_words(docstrings(modules(CLONE / "tests").values())),
    }


def test_no_package_grows() -> None:
    found = sizes()
    assert found.keys() == MAX_SIZE.keys(), "each package has a budget"
    grown = {name: (size, MAX_SIZE[name]) for name, size in found.items() if np.greater(size, MAX_SIZE[name]).any()}
    assert grown == {}, "see the budgets of this module"
    core = np.sum([size for name, size in found.items() if name.removeprefix("asyncflow_sdk/") in CORE], axis=0)
    assert np.all(core <= MAX_CORE), f"{core} of {MAX_CORE}"


def test_the_code_gets_no_harder_to_read() -> None:
    more = {name: (count, MAX_COUNT[name]) for name, count in counts().items() if count > MAX_COUNT[name]}
    assert more == {}, "see the budgets of this module"


def test_modules_are_named_by_nouns_and_classes_by_one_name_each() -> None:
    assert [str(path) for path in code() if path.name.endswith("ing.py")] == []
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
