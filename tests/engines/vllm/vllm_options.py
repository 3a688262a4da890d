"""With which options vLLM is started in tests: small, and without compiling."""

from typing import Any

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_rows": 32,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
}
