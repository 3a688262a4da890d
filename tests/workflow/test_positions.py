"""Positions of keys in TOML: every key that the parser knows is found, and stands where it is said to."""

import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_sdk.workflow.positions import positions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = '''\
# a comment = 1
steps = 200
"a b" . 'c' = """x = 1
[no] \\""" "quoted"" """   # after
[train]
lr = 1e-5
betas = [ 0.9, # one = 1
  0.95 ]
env = { A = "1,}]", B.c = 'x#' }
[[stages]]
work = { logprobs = "torch" }
[stages.env]
X = "1"
[[stages]]
when = 1979-05-27 07:32:00
needs = [{ a = [[1], [{ b = 2 }]] }, "]"]
'''


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path} - {()} | {each for key, child in children for each in paths_of(child, (*path, key))}


def test_keys_stand_where_it_says() -> None:
    found = positions(TEXT)

    assert set(found) == paths_of(tomllib.loads(TEXT))
    lines = TEXT.split("\n")
    for path, (line, column) in found.items():
        if isinstance(path[-1], str):
            assert lines[line - 1][column - 1 :].lstrip("\"'[").startswith(path[-1]), path
    assert found["train", "env", "B", "c"] == (9, 23)
    assert found["stages", 1, "needs", 0, "a", 1, 0, "b"] == (16, 25)
    assert found["stages", 0, "env"] == (12, 9)


KEYS = st.text("ab", min_size=1, max_size=2)
SCALARS = st.sampled_from(["1", "-2.5e3", "true", '"a = 1"', "'#]'", '"""\n[x]\ny = 2"""', "1979-05-27", '"\\"}"'])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: "[ # c\n" + ",\n".join(each) + "]"),
        st.dictionaries(KEYS, inner, max_size=2).map(
            lambda d: "{" + ", ".join(f"{k} = {v}" for k, v in d.items()) + "}"
        ),
    ),
    max_leaves=6,
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["[{}]", "[[{}]]", "[ {} ]  # t"]),
            st.lists(KEYS, min_size=1, max_size=2),
            st.dictionaries(KEYS, VALUES, max_size=2),
        ),
        max_size=4,
    )
)
def test_every_key_the_parser_knows_is_found(drawn: list[tuple[str, list[str], dict[str, str]]]) -> None:
    text = ""
    for head, keys, pairs in drawn:
        text += head.format(".".join(keys)) + "\n" + "".join(f"{key} = {value}\n" for key, value in pairs.items())
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # tables that were given twice

    assert set(positions(text)) == paths_of(parsed)
