"""SGLangEngine: generates with an ``sglang.Engine`` in the worker's own process.

    af.Rollout("sglang-engine", model="models/mine", tp_size=2, mem_fraction_static=0.8)

It opens no port and uses no HTTP. Its schedulers are child processes of the worker and end with it.
"""

from __future__ import annotations

import os
from typing import Any

from asyncflow_http.limits import MAX_ROWS, RESPONSE_S, START_S, UPDATE_S
from asyncflow_sdk.types import check_least

from .arguments import folder_and_options, own_environment, own_options
from .in_process import InProcessLink
from .rollout import SGLangRollout


class SGLangEngine(SGLangRollout):
    """``model``: a Hugging Face folder with weights in safetensors. ``options``: of
    ``sglang.Engine``, except those set by the adapter. One per process.

    ``max_rows``: concurrent responses. ``version``: of the folder's weights. ``directory``:
    versions are written there; None: shared memory. ``start_s``, ``request_s``, ``update_s``: time
    limits of a start, a response and each call of a load; a slower engine counts as lost.
    """

    def __init__(
        self,
        model: str,
        *,
        directory: str | None = None,
        max_rows: int = MAX_ROWS,
        version: int = 0,
        start_s: float = START_S,
        request_s: float = RESPONSE_S,
        update_s: float = UPDATE_S,
        **options: Any,
    ) -> None:
        check_least(1, max_rows=max_rows)
        folder, left = folder_and_options(model, options)
        os.environ.update(own_environment())
        given = own_options(model, left, dtype=folder.dtype, context=folder.context, version=version)
        link = InProcessLink(given, start_s)
        try:
            link.info.check(link.name)
            super().__init__(
                link,
                folder,
                link.info,
                directory=directory,
                max_rows=max_rows,
                request_s=request_s,
                update_s=update_s,
            )
        except BaseException:
            link.end()
            raise
