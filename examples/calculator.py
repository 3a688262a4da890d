"""An agent of a module of its own, so that rollout workers can import it: a model with a calculator.

The model writes, and whenever it ends its turn by "=" it is told what comes out: "12+30=" → "42". Its last line is the answer.
"""

from __future__ import annotations

import ast
import operator

import asyncflow_sdk as af

TURNS = 4
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(text: str) -> str:
    """The value of a sum; "none" for what is no sum."""
    try:
        return str(_value(ast.parse(text.rpartition("=")[0], mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "none"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return int(OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("no sum")


async def solve(turns: af.Turns, answer: str) -> dict[str, float | int]:
    """One conversation. The reward is the environment's: whether the last turn is the answer."""
    calls = 0
    turn = await turns.generate(stop="=")
    while turn.text.endswith("=") and calls < TURNS:
        calls += 1
        turns.observe(calculate(turn.text))
        turn = await turns.generate(stop="=")
    return {"reward": float(turn.text == answer), "calls": calls}
