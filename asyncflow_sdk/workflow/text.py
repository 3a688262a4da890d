"""Text to token ids and back, by a model folder's own tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import PluginError
from ..types import Ragged


class Text:
    """Thread-safe. Needs the ``tokenizers`` package, which every text engine brings."""

    def __init__(self, file: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise PluginError(
                "text prompts need tokenizers; install it with: pip install 'asyncflow-sdk[text]'"
            ) from None
        self._tokenizer = tokenizers.Tokenizer.from_file(file)

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[npt.NDArray[np.int32]]:
        """Token ids, with the special tokens that the tokenizer adds by itself, as at the beginning of a text; or without."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [np.array(e.ids, np.int32) for e in encoded]

    def decode(self, ids: Ragged) -> list[str]:
        """Text without special tokens."""
        return list(self._tokenizer.decode_batch(ids.tolist(), skip_special_tokens=True))
