"""What tests hear of their child processes is what these say, however fast."""

import os

import pytest
from children import Child


def say_at_once() -> None:
    """Three things in one write, and half of a fourth."""
    os.write(1, b'1\n["two"]\n3\n"fo')


def test_what_is_said_at_once_is_heard_one_by_one() -> None:
    with Child(say_at_once) as child:
        assert [child.hear() for _ in range(3)] == [1, ["two"], 3]
        with pytest.raises(AssertionError, match="the child said nothing; it ended with"):
            child.hear()
