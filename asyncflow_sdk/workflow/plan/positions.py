"""Positions of the keys of a TOML text. The parsers keep none; this one reads a text after they
accepted it.

positions('a = 1\\n[b]\\nc.d = [{e = 2}]\\n')      # {("a",): (1, 1), ("b",): (2, 2), ("b", "c"): (3, 1), ("b", "c", "d"): ...}
"""

from __future__ import annotations

import re

from .problems import Key

Position = tuple[int, int]
"""Line and column, both from 1."""

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'', re.S)
_SCALAR = re.compile(r"[^,\]}#\r\n]+")
_KEY = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|[A-Za-z0-9_-]+')
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([btnfre"\\]))')
_SHORT = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b", '"': '"', "\\": "\\"}


def positions(text: str) -> dict[Key, Position]:
    """Return the first position of every key, of every table, and of every table in an array."""
    return _Walk(text).found


class _Walk:
    """One pass over a text, from pair to pair."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self.found: dict[Key, Position] = {}
        self._arrays: dict[Key, int] = {}
        table: Key = ()
        self._space()
        while self._at < len(text):
            if text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._space()

    def _space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        assert found is not None, f"no TOML at {self._at}"
        self._at = found.end()
        return found.group()

    def _header(self) -> Key:
        array = self._text.startswith("[[", self._at)
        self._at += 1 + array
        self._space()
        table = self._keys((), array)
        self._at += 1 + array
        return table

    def _keys(self, path: Key, array: bool = False) -> Key:
        """Read a dotted key and record its parts. In an array of tables it is the last table's.
        ``array``: begin another table."""
        while True:
            self._space()
            start, raw = self._at, self._take(_KEY)
            path = (*path, _ESCAPE.sub(_unescaped, raw[1:-1]) if raw[0] == '"' else raw.strip("'"))
            self._record(path, start)
            self._space()
            last = not self._text.startswith(".", self._at)
            if last and array:
                self._arrays[path] = self._arrays.get(path, -1) + 1
            if path in self._arrays:
                path = (*path, self._arrays[path])
                self._record(path, start)
            if last:
                return path
            self._at += 1

    def _pair(self, table: Key) -> None:
        path = self._keys(table)
        self._at += 1  # the "="
        self._space()
        self._value(path)

    def _value(self, path: Key) -> None:
        first = self._text[self._at]
        if first in "\"'":
            self._take(_STRING)
        elif first in "[{":
            self._at += 1
            self._inside(path, "]" if first == "[" else "}")
        else:
            self._take(_SCALAR)

    def _inside(self, path: Key, end: str) -> None:
        """Read the elements of an array, or the pairs of an inline table."""
        number = 0
        while True:
            self._space()
            if self._text[self._at] == end:
                self._at += 1
                return
            if end == "}":
                self._pair(path)
            else:
                self._record((*path, number), self._at)
                self._value((*path, number))
                number += 1
            self._space()
            if self._text[self._at] == ",":
                self._at += 1

    def _record(self, path: Key, at: int) -> None:
        line = self._text.count("\n", 0, at)
        self.found.setdefault(path, (line + 1, at - (self._text.rfind("\n", 0, at) + 1) + 1))


def _unescaped(match: re.Match[str]) -> str:
    short, long, one = match.groups()
    return chr(int(short or long, 16)) if short or long else _SHORT[one]
