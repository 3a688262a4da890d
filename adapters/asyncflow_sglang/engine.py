"""SGLangEngine: generates with an ``sglang.Engine`` in the worker's own process.

    af.Rollout("sglang-engine", model="models/mine", tp_size=2, mem_fraction_static=0.8)

No port is opened and nothing goes through HTTP; schedulers are processes below the worker's, and end with it.
"""

from __future__ import annotations

import os
from typing import Any

from asyncflow_sdk.types import check_least

from .arguments import own_environment, own_options, served
from .inside import Inside
from .rollout import SGLangRollout


class SGLangEngine(SGLangRollout):
    """``model``: a Hugging Face folder with weights in safetensors. ``options``: any of ``sglang.Engine`` but those that say what it
    serves and what requests mean. One in a process at a time.

    ``max_rows``: responses asked for at once. ``version``: what the weights in the folder count as. ``directory``: where versions
    are written; None: shared memory. ``start_s``, ``request_s``, ``update_s``: how long a start, a response and a load
    may take; an engine that takes longer counts as lost.
    """

    def __init__(
        self,
        model: str,
        *,
        directory: str | None = None,
        max_rows: int = 256,
        version: int = 0,
        start_s: float = 600.0,
        request_s: float = 1800.0,
        update_s: float = 600.0,
        **options: Any,
    ) -> None:
        check_least(1, max_rows=max_rows)
        checkpoint, left = served(model, options)
        os.environ.update(own_environment())
        given = own_options(model, left, dtype=checkpoint.dtype, context=checkpoint.context, version=version)
        inside = Inside(given, start_s)
        try:
            inside.info.check(inside.name)
            super().__init__(
                inside, checkpoint, inside.info, context=checkpoint.context_of(inside.info.max_req_input_len),
                directory=directory, max_rows=max_rows, request_s=request_s, update_s=update_s,
            )  # fmt: skip
        except BaseException:
            inside.end()
            raise
