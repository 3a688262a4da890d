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
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["asyncflow_sdk", "adapters"]
FOLDER = ROOT / ".mutants"
TABLE = ROOT / "tests" / "mutants.json"
SEED, COUNT = 15, 60
BUDGET_S = 240.0
"""How long the tests of one mutant take, by what they took unchanged. Those beyond it are not run, and are counted."""

SUITES: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "main": (".venv", ["tests"], {}),
    "deepspeed": (
        ".venv-deepspeed",
        ["tests/engines/deepspeed"],
        {"ASYNCFLOW_TEST_DEEPSPEED": "here", "DS_ACCELERATOR": "cpu"},
    ),
    "sglang": (
        ".venv-sglang",
        ["tests/engines/sglang"],
        {"ASYNCFLOW_TEST_SGLANG": "here", "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"},
    ),
    "vllm": (
        ".venv-vllm",
        ["tests/engines/vllm"],
        {
            "ASYNCFLOW_TEST_VLLM": "here",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
    ),
}
"""Of each the environment, the tests, and the variables that they ask for."""
TOGETHER = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
PROBE = '''"""Says which tests reach a place that is to be mutated."""
import os

_said = set()


def at(place):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    if (place, test) not in _said:
        _said.add((place, test))
        with open(os.environ["ASYNCFLOW_PROBES"], "a") as log:
            log.write(f"{place}\\t{test}\\n")
'''

OPPOSITE: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "+",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One place, and what is written there instead. ``start`` and ``end`` are offsets in bytes."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: bytes, written: str) -> bytes:
        return source[: self.start] + written.encode() + source[self.end :]


def mutations(node: ast.expr, part: Callable[[ast.expr], str]) -> Iterator[str]:
    """What may be written in place of an expression, each with one fault; ``part`` is the text of a part of it."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPPOSITE:
            yield f"({part(left)}) {OPPOSITE[type(op)]} ({part(right)})"
        case ast.BoolOp(op=op, values=values):
            yield (" or " if isinstance(op, ast.And) else " and ").join(f"({part(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"bool({part(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPPOSITE:
            if not any(isinstance(each, ast.Constant | ast.JoinedStr) for each in (left, right) if is_text(each)):
                yield f"({part(left)}) {OPPOSITE[type(op)]} ({part(right)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)) if value < 5:  # of a larger one the next may do as well
            yield str(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"({part(orelse)}) if ({part(test)}) else ({part(body)})"


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def places(path: Path) -> Iterator[Mutant]:
    """Every mutation of a file: expressions of function bodies, conditions, calls whose result nobody takes."""
    raw = path.read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offsets(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def part(node: ast.expr) -> str:
        start, end = offsets(node)
        return raw[start:end].decode()

    def mutant(node: ast.expr, after: str) -> Mutant:
        return Mutant(path.relative_to(ROOT).as_posix(), node.lineno, *offsets(node), part(node), after)

    def expressions(node: ast.AST) -> Iterator[Mutant]:
        match node:
            case (
                ast.JoinedStr()
                | ast.Raise()
                | ast.Assert()
                | ast.FunctionDef()
                | ast.AsyncFunctionDef()
                | ast.ClassDef()
            ):
                return  # texts, errors' words; functions within are met by themselves
            case ast.Expr(value=ast.Call() as call):
                if not part(call.func).startswith(("_log", "warnings", "super")):
                    yield mutant(call, "None")
            case ast.If(test=test) | ast.While(test=test):
                yield mutant(test, f"not ({part(test)})")
            case ast.AnnAssign(annotation=annotation):
                for child in ast.iter_child_nodes(node):
                    if child is not annotation:
                        yield from expressions(child)
                return
        if isinstance(node, ast.expr) and node.lineno == node.end_lineno:
            yield from (mutant(node, after) for after in mutations(node, part))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.pattern):
                yield from expressions(child)

    for node in ast.walk(ast.parse(raw)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from expressions(statement)


def draw(seed: int, count: int) -> list[Mutant]:
    found = [
        mutant
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "templates" not in path.parts and "__pycache__" not in path.parts
        for mutant in sorted(places(path), key=lambda each: (each.start, each.after))
    ]
    return sorted(random.Random(seed).sample(found, count), key=lambda each: (each.path, each.start))


def copy_of_the_project(to: Path) -> Path:
    """What git has, without its history. Environments are linked, and find the copy's packages first."""
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    for environment in ROOT.glob(".venv*"):
        (to / environment.name).symlink_to(environment)
    return to


def pytest_of(suite: str) -> list[str]:
    return [f"{SUITES[suite][0]}/bin/python", "-m", "pytest"]


def environment_of(copy: Path, suite: str, **more: str) -> dict[str, str]:
    paths = [str(copy), str(copy / "adapters")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "CI": "true", **SUITES[suite][2], **more}  # fmt: skip


def reach(drawn: list[Mutant], suites: list[str]) -> None:
    """One run of the suites with a probe at each place. Writes `reach.json`: of each place the tests, and their times."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_of_the_project(Path(folder) / "project")
        by_path: dict[str, list[tuple[int, Mutant]]] = {}
        for number, mutant in enumerate(drawn):
            by_path.setdefault(mutant.path, []).append((number, mutant))
        for path, there in by_path.items():
            source = (copy / path).read_bytes()
            for number, mutant in sorted(there, key=lambda each: -each[1].start):
                probe = f'(__import__("asyncflow_sdk._probe", fromlist=["at"]).at({number}) or ({mutant.before}))'
                source = mutant.apply(source, probe)
            (copy / path).write_bytes(source)
        (copy / "asyncflow_sdk" / "_probe.py").write_text(PROBE)
        for suite in suites:
            log, report = FOLDER / f"probes-{suite}.tsv", FOLDER / f"junit-{suite}.xml"
            log.unlink(missing_ok=True)
            log.touch()
            command = [*pytest_of(suite), f"--junitxml={report}", "-o", "junit_family=xunit1", *SUITES[suite][1]]
            command += TOGETHER if suite == "main" else []
            subprocess.run(command, cwd=copy, env=environment_of(copy, suite, ASYNCFLOW_PROBES=str(log)), check=False)


def read_reach(count: int) -> list[list[tuple[float, str, str]]]:
    """Of each place its tests, the quickest first: seconds, suite, test."""
    found: list[set[tuple[float, str, str]]] = [set() for _ in range(count)]
    for suite in SUITES:
        log, report = FOLDER / f"probes-{suite}.tsv", FOLDER / f"junit-{suite}.xml"
        if not report.exists():
            continue
        seconds = {
            f"{case.get('file')}::{case.get('name')}": float(case.get("time") or 0)
            for case in xml.parse(report).iter("testcase")
            if case.find("skipped") is None
        }
        for line in log.read_text().splitlines():
            number, test = line.split("\t", 1)
            if test in seconds:
                found[int(number)].add((seconds[test], suite, test))
    return [sorted(each) for each in found]


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
    command = [*pytest_of(suite), "-x", "-q", "--timeout=120", "-rf", "@chosen.txt"]
    said = copy / "said.txt"
    with said.open("w") as out:
        ended = subprocess.run(
            command, cwd=copy, env=environment_of(copy, suite), stdout=out, stderr=out, check=False,
            start_new_session=True,
        )  # fmt: skip
    if ended.returncode == 0:
        return None
    if ended.returncode == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit(f"these tests are not there any more; say reach again:\n{said.read_text(errors='replace')}")
    summary = said.read_text(errors="replace").rpartition(" short test summary info ")[2].splitlines()
    named = [line.split(" ")[1] for line in summary if line.startswith(("FAILED ", "ERROR "))]
    return named[0] if named else f"the suite {suite} ended with status {ended.returncode}"


def run_one(mutant: Mutant, tests: list[tuple[float, str, str]]) -> Outcome:
    chosen, total = [], 0.0
    for seconds, suite, test in tests:
        total += seconds
        if total > BUDGET_S and chosen:
            break
        chosen.append((suite, test))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_of_the_project(Path(folder) / "project")
        source = (copy / mutant.path).read_bytes()
        (copy / mutant.path).write_bytes(mutant.apply(source, f"({mutant.after})"))
        caught = ""
        for suite in SUITES:
            named = [test for of, test in chosen if of == suite]
            while named and not caught:
                failed = first_failure(copy, suite, named)
                if failed is None:
                    break
                if failed not in named or first_failure(copy, suite, [failed]) is not None:
                    caught = failed
                else:  # by chance, and not because of the mutant
                    named = named[named.index(failed) + 1 :]
    return Outcome(mutant.path, mutant.line, mutant.before, mutant.after, len(tests), len(chosen), caught)


def run(drawn: list[Mutant], processes: int) -> list[Outcome]:
    reached = read_reach(len(drawn))
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        outcomes = []
        for outcome in pool.map(run_one, drawn, reached):
            outcomes.append(outcome)
            print(
                f"{len(outcomes)} of {len(drawn)}: {outcome.path}:{outcome.line}",
                outcome.caught_by or "NOT CAUGHT",
                flush=True,
            )
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
    parser.add_argument("--suites", nargs="*", default=["main"], choices=list(SUITES))
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
    sys.exit(main())
