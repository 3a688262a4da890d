"""CPython 3.11 before 3.11.8 counts the depth of a parse in one place for all of them. One that begins in the midst of another
breaks that one off: SystemError, "AST constructor recursion depth mismatch" (its issue 106905). A parse runs no Python but what the
garbage collector calls: finalizers, its callbacks (Hypothesis has one), and threads that are let run meanwhile."""

from __future__ import annotations

import ast
import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

BROKEN = (3, 11) <= sys.version_info < (3, 11, 8)
_lock = threading.RLock()


@contextlib.contextmanager
def whole_parses() -> Iterator[None]:
    """Meanwhile no garbage is collected in the midst of `ast.parse`, by any thread. Elsewhere than in those versions it does nothing."""
    parse: Any = ast.parse
    if not BROKEN:
        yield
        return

    def whole(*arguments: Any, **options: Any) -> Any:
        with _lock:
            enabled = gc.isenabled()
            gc.disable()
            try:
                return parse(*arguments, **options)
            finally:
                if enabled:
                    gc.enable()

    ast.parse = whole
    try:
        yield
    finally:
        ast.parse = parse
