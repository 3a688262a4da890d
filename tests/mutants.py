"""Mutation testing: do the tests notice when one place of the code is wrong?

A seed draws places in all packages. The suite runs once with a probe at each place, which says which tests reach it.
Then each place is changed alone, in a copy of the project, and the tests that reach it run, the quickest first, until
one fails. It must fail again alone; if not, it failed by chance. `make mutants` does all of it and writes the table;
how many were caught must not fall when the tests or the code are redrawn.

    python tests/mutants.py reach            # one run of the suite: which tests reach which place
    python tests/mutants.py run              # every mutant, in two processes
    python tests/mutants.py table            # what was found, as Markdown
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import json
import os
import random
import subprocess
import tempfile
from ast import unparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["asyncflow_sdk", "adapters"]
FOLDER = ROOT / ".mutants"
TABLE = ROOT / "tests" / "mutants.json"
SEED, COUNT = 15, 60
BUDGET_S = 240.0
"""How long the tests of one mutant take, by what they took unchanged. Those beyond it are not run, and are counted."""
SUITES = ["main", "deepspeed", "sglang", "vllm"]
"""Those of engines have environments of their own."""
VARIABLES = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "CI": "true",
    "DS_ACCELERATOR": "cpu", "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
TOGETHER = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
PROBE = '''"""Notes which tests reach a place that is to be mutated, and, as a plugin of pytest, how long they take."""
import functools
import os


@functools.cache
def note(what, value, test):
    with open(os.environ["ASYNCFLOW_PROBES"], "a") as log:
        log.write(f"{what}\\t{value}\\t{test}\\n")


def at(place):
    note("place", place, os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0])


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ and not report.skipped:
        note("seconds", report.duration, report.nodeid)
'''

OPPOSITE: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "+",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """The mutation of this ``number`` in a file: an expression, and what is written there instead."""

    path: str
    number: int
    line: int
    before: str
    after: str


def with_fault(node: ast.expr) -> str:
    """An expression with one fault, as text; "" for those that get none."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPPOSITE:
            return f"({unparse(left)}) {OPPOSITE[type(op)]} ({unparse(right)})"
        case ast.BoolOp(op=op, values=values):
            return (" or " if isinstance(op, ast.And) else " and ").join(f"({unparse(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"bool({unparse(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPPOSITE:
            text = any(
                isinstance(getattr(each, "value", each), str | bytes | ast.JoinedStr) for each in (left, right)
            )
            return "" if text else f"({unparse(left)}) {OPPOSITE[type(op)]} ({unparse(right)})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)) if value < 5:  # of a larger one the next may do as well
            return str(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({unparse(orelse)}) if ({unparse(test)}) else ({unparse(body)})"
    return ""


def mutations(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Every mutation within a node: expressions, conditions, calls whose result nobody takes."""
    match node:
        case (
            ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef()
        ):
            return  # texts, errors' words; functions within are met by themselves
        case ast.Expr(value=ast.Call() as call) if not unparse(call.func).startswith(("_log", "warnings", "super")):
            yield call, "None"
        case ast.If(test=test) | ast.While(test=test):
            yield test, f"not ({unparse(test)})"
        case ast.expr() if node.lineno == node.end_lineno and (after := with_fault(node)):
            yield node, after
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.pattern) and child is not getattr(node, "annotation", None):
            yield from mutations(child)


def mutations_of_functions(tree: ast.Module) -> list[tuple[ast.expr, str]]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [each for function in functions for statement in function.body for each in mutations(statement)]


def draw(seed: int, count: int) -> list[Mutant]:
    found = [
        Mutant(path.relative_to(ROOT).as_posix(), number, node.lineno, unparse(node), after)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "templates" not in path.parts
        for number, (node, after) in enumerate(mutations_of_functions(ast.parse(path.read_bytes())))
    ]
    return sorted(random.Random(seed).sample(found, count), key=lambda each: (each.path, each.line, each.number))


class Replace(ast.NodeTransformer):
    """Put another expression into a tree."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


@contextlib.contextmanager
def copy_with(mutants: Sequence[Mutant], new: Callable[[Mutant, ast.expr], ast.expr]) -> Iterator[Path]:
    """What git has, with new expressions at places. Environments are linked, and find the copy's packages first."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        subprocess.run(f"git ls-files -z | xargs -0 cp --parents -t {copy}", cwd=ROOT, shell=True, check=True)
        for environment in ROOT.glob(".venv*"):
            (copy / environment.name).symlink_to(environment)
        for path in {mutant.path for mutant in mutants}:
            tree = ast.parse((copy / path).read_bytes())
            expressions = [node for node, _ in mutations_of_functions(tree)]
            for mutant in (each for each in mutants if each.path == path):
                node = expressions[mutant.number]
                tree = Replace(node, new(mutant, node)).visit(tree)
            (copy / path).write_text(unparse(tree))
        yield copy


def run_pytest(copy: Path, suite: str, *arguments: str, **variables: str) -> int:
    """Run tests of a suite in a copy of the project. Returns the exit code."""
    python = copy / (".venv" if suite == "main" else f".venv-{suite}") / "bin/python"
    own = {"PYTHONPATH": f"{copy}:{copy / 'adapters'}", f"ASYNCFLOW_TEST_{suite.upper()}": "here"}
    with (copy / "said.txt").open("w") as out:
        return subprocess.run(
            [python, "-m", "pytest", *arguments], cwd=copy, env={**os.environ, **VARIABLES, **own, **variables},
            stdout=out, stderr=out, check=False, start_new_session=True,
        ).returncode  # fmt: skip


def reach(drawn: list[Mutant], suites: list[str]) -> None:
    """Run the suites once with a probe at each place. Writes which tests reach it, and how long they take."""

    def probe(mutant: Mutant, node: ast.expr) -> ast.expr:
        at = f"__import__('asyncflow_sdk._probe', fromlist=['at']).at({drawn.index(mutant)})"
        return ast.BoolOp(ast.Or(), [ast.parse(at, mode="eval").body, node])

    FOLDER.mkdir(exist_ok=True)
    with copy_with(drawn, probe) as copy:
        (copy / "asyncflow_sdk" / "_probe.py").write_text(PROBE)
        for suite in suites:
            log = FOLDER / f"probes-{suite}.tsv"
            log.write_text("")
            tests = ["tests", *TOGETHER] if suite == "main" else [f"tests/engines/{suite}"]
            run_pytest(copy, suite, "-p", "asyncflow_sdk._probe", *tests, ASYNCFLOW_PROBES=str(log))


def read_reach(count: int) -> list[list[tuple[float, str, str]]]:
    """Of each place its tests, the quickest first: seconds, suite, test."""
    found: list[set[tuple[str, str]]] = [set() for _ in range(count)]
    seconds = Counter[tuple[str, str]]()
    for log in FOLDER.glob("probes-*.tsv"):
        suite = log.stem.removeprefix("probes-")
        for line in log.read_text().splitlines():
            what, value, test = line.split("\t", 2)
            if what == "seconds":
                seconds[suite, test] += float(value)
            else:
                found[int(value)].add((suite, test))
    return [sorted((seconds[each], *each) for each in tests if each in seconds) for tests in found]


@dataclass
class Outcome:
    """What became of one mutant. ``tests`` ran of those that ``reach`` it."""

    path: str
    line: int
    before: str
    after: str
    reach: int
    tests: int
    caught_by: str


def first_failure(copy: Path, suite: str, tests: list[str]) -> str | None:
    """The first of these tests that fails in this copy of the project; None: all pass."""
    (copy / "chosen.txt").write_text("\n".join(tests))
    status = run_pytest(copy, suite, "-x", "--timeout=120", "@chosen.txt")
    if status == pytest.ExitCode.OK:
        return None
    failed = copy / ".pytest_cache/v/cache/lastfailed"
    named = json.loads(failed.read_text()) if failed.exists() else {}
    if status == pytest.ExitCode.USAGE_ERROR and not named:  # no module fails as it is imported
        raise SystemExit(f"these tests are not there any more; say reach again:\n{(copy / 'said.txt').read_text()}")
    return next(iter(named), f"the suite {suite} ended with status {status}")


def run_one(mutant: Mutant, tests: list[tuple[float, str, str]]) -> Outcome:
    fit = sum(total <= BUDGET_S for total in accumulate(seconds for seconds, _, _ in tests))
    chosen = tests[: max(fit, 1)]
    caught = ""
    with copy_with([mutant], lambda *_: ast.parse(mutant.after, mode="eval").body) as copy:
        for suite in SUITES:
            named = [test for _, of, test in chosen if of == suite]
            while named and not caught and (failed := first_failure(copy, suite, named)):
                if failed not in named or first_failure(copy, suite, [failed]):
                    caught = failed
                else:  # by chance, and not because of the mutant
                    named = named[named.index(failed) + 1 :]
    return Outcome(mutant.path, mutant.line, mutant.before, mutant.after, len(tests), len(chosen), caught)


def run(drawn: list[Mutant], processes: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        for outcome in pool.map(run_one, drawn, read_reach(len(drawn))):
            outcomes.append(outcome)
            place = f"{len(outcomes)} of {len(drawn)}: {outcome.path}:{outcome.line}"
            print(place, outcome.caught_by or "NOT CAUGHT", flush=True)
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    caught = sum(bool(outcome.caught_by) for outcome in outcomes)
    rows = [
        f"| `{each.path}:{each.line}` | `{short(each.before)}` | `{short(each.after)}` | {each.tests} of {each.reach} |"
        f" {f'`{each.caught_by}`' if each.caught_by else 'no'} |"
        for each in outcomes
    ]
    head = ["| place | was | became | tests that ran, of those that reach it | caught by |", "|---|---|---|---|---|"]
    return "\n".join([f"{caught} of {len(outcomes)} mutants were caught.", "", *head, *rows])


def short(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 60 else text[:57] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["draw", "reach", "run", "table"])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--suites", nargs="*", default=["main"], choices=SUITES)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    if asked.what == "table":
        print(table([Outcome(**each) for each in json.loads(TABLE.read_text())]))
        return
    drawn = draw(asked.seed, asked.count)
    if asked.what == "draw":
        for mutant in drawn:
            print(f"{mutant.path}:{mutant.line}: {short(mutant.before)} -> {short(mutant.after)}")
    elif asked.what == "reach":
        reach(drawn, asked.suites)
    else:
        outcomes = run(drawn, asked.processes)
        TABLE.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
        print(table(outcomes))


if __name__ == "__main__":
    main()
