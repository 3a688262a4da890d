"""Keep garbage collection out of `ast.parse`, for CPython 3.11 before 3.11.8 (its issue 106905).

These versions count the depth of all parses in one place. A parse within another breaks that one:
SystemError, "AST constructor recursion depth mismatch". Only the collector runs Python code during
a parse: finalizers, callbacks (Hypothesis has one), and thread switches in them.
"""

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
    """Suspend garbage collection during each `ast.parse`, of any thread. Does nothing in other
    versions of CPython."""
    parse: Any = ast.parse
    if not BROKEN:
        yield
        return

    def whole(*arguments: Any, **options: Any) -> Any:
        """Parse without garbage collection."""
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
