"""Log-probs and entropies in chunks of tokens: the logits of a chunk at a time, computed again in the backward pass.

    head = chunked_head(model, device)                 # None if log-probs of the model need the logits of all tokens
    found = head.stats(model, forward, part)           # (2, tokens): log-probs, entropies

Logits of one row of 16,384 tokens at 152,000 tokens of vocabulary take 9 GiB in float32, and their log-softmax
with gradients five times as much.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from .collate import KeptTokens, MicroBatch, no_rows

CHUNK_LOGITS = 1 << 23
"""Logits of a chunk: 32 MiB in float32. With smaller chunks the heap of glibc fragments."""

_log = logging.getLogger(__name__)
_TAILS: tuple[Callable[[Any, float], Any], ...] = (
    lambda logits, _: logits,
    lambda logits, number: logits * number,
    lambda logits, number: logits / number,
    lambda logits, number: (logits / number).tanh() * number,
)
"""Changes of a model to the output of its output layer. The last operation keeps none of its input or output for
the backward pass."""


@dataclass(frozen=True)
class ChunkedHead:
    """``tail``: the logits by the output of the output layer. ``tokens``: maximum of a chunk."""

    tail: Callable[[Any], Any]
    tokens: int

    def stats(
        self, model: Any, forward: Callable[[], Any], part: MicroBatch, *, temperature: float, entropy_gradient: bool
    ) -> Any:
        """Return log-probs and entropies of the response tokens of ``part``: (2, tokens). ``forward``: passes the
        inputs of ``part`` through ``model``.

        Hazard: the weights of the output layer are whole only within its own call (ZeRO-3) or that of the model
        (FSDP2), in the forward and in the backward pass. So one hook replaces its output before the wrapper's hooks
        see it, and another makes it the only output of the model: two would gather in different orders on ranks that
        use one."""
        inputs, outputs = [], []

        def pick(_layer: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
            inputs.append(given[0].flatten(0, 1)[part.predicted_at])
            return (inputs[0][None, :0], *given[1:])

        def replace(layer: Any, *_: Any) -> Any:
            operands = [inputs[0], layer.weight, layer.bias]
            kind = inputs[0].device.type
            if torch.is_autocast_enabled(kind):  # the backward pass of a Function is outside of it
                dtype = torch.get_autocast_dtype(kind)
                operands = [None if each is None else each.to(dtype) for each in operands]
            with torch.autocast(kind, enabled=False):
                return _ChunkedStats.apply(*operands, part.targets, self, part.kept, temperature, entropy_gradient)

        layer = model.get_output_embeddings()
        with ExitStack() as hooks:
            for hook in (
                layer.register_forward_pre_hook(pick),
                layer.register_forward_hook(replace, prepend=True),
                layer.register_forward_hook(lambda *given: outputs.append(given[-1])),
                _plain(model).register_forward_hook(lambda *_: outputs.pop(), prepend=True),
            ):
                hooks.callback(hook.remove)
            return forward()[0]


def chunked_head(model: Any, device: Any) -> ChunkedHead | None:
    """Return the way to compute log-probs of ``model`` in chunks, by a pass of one token whose logits are replaced.
    None, said in the log, if its output layer is not linear or changed in an unknown way. All ranks call it."""
    layer = model.get_output_embeddings()
    found: list[tuple[int, Any]] = []

    def replace(_layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        grid = torch.linspace(-50, 50, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
        found.append((inputs[0].shape[-1], grid))
        return grid

    hook = layer.register_forward_hook(replace)
    try:
        with torch.no_grad():
            logits = model(input_ids=no_rows(device=device).input_ids, use_cache=False).logits
    finally:
        hook.remove()
    if len(found) == 1 and type(layer).forward is torch.nn.Linear.forward:
        ((width, grid),) = found
        for tail in _tails(_plain(model).config, grid.dtype, logits.dtype):
            if torch.equal(tail(grid).to(logits.dtype), logits):
                # At least a sixteenth of the weights: a chunk reads all of them, and adds to all of their gradients.
                return ChunkedHead(tail, max(1, CHUNK_LOGITS // grid.shape[-1], width // 16))
    _log.warning(
        "log-probs of %s take the logits of all tokens of a pass: the change of its output layer's output is unknown",
        type(_plain(model)).__name__,
    )
    return None


def _tails(config: Any, *dtypes: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield the known changes by each number of a configuration: names of options do not tell the operation."""
    numbers = [1.0]
    for part in (config, config.get_text_config()):
        numbers += [float(each) for each in part.to_dict().values() if isinstance(each, int | float) and each]
    for dtype in dict.fromkeys(dtypes):
        for number in dict.fromkeys(numbers):
            for tail in _TAILS:
                yield partial(_in, dtype, tail, number)


def _in(dtype: Any, tail: Callable[[Any, float], Any], number: float, logits: Any) -> Any:
    return tail(logits.to(dtype), number)


def _plain(model: Any) -> Any:
    """Return the model that DeepSpeed's engine holds, or ``model``."""
    return getattr(model, "module", model)


def _scaled(logits: Any, temperature: float, kept: KeptTokens | None, first: int) -> Any:
    """Return the logits at a temperature, in float32 or float64, of the kept tokens, possibly in place.
    ``first``: number of the first target."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1.0 else logits.div_(temperature)
    return logits if kept is None else kept.cut_(logits, first)


class _ChunkedStats(torch.autograd.Function):  # type: ignore[misc]
    """Log-probs and entropies of ``targets``, (1, 2, tokens), by the output layer's input and weights.

    With log-probs q of all tokens, the entropy H and a target t, derivatives by the logits / temperature are
    d q[t] = δ[t] − exp(q) and d H = −exp(q) (q + H).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, head: ChunkedHead, *given: Any) -> Any:
        kept_tokens, temperature, _ = given
        found = []
        for start in range(0, max(len(hidden), 1), head.tokens):
            h, t = hidden[start : start + head.tokens], targets[start : start + head.tokens]
            logits = _scaled(head.tail(linear(h, weight, bias)), temperature, kept_tokens, start)
            total = logits.logsumexp(-1)
            chosen = logits.gather(1, t[:, None])[:, 0] - total
            p = (logits - total[:, None]).exp_()
            found.append(torch.stack((chosen, total - torch.einsum("tv,tv->t", p, logits), total)))
            del logits, p
        kept = torch.cat(found, 1)
        ctx.save_for_backward(hidden, weight, bias, targets, kept)
        ctx.given = head, *given
        return kept[None, :2].clone()  # no view: FSDP would warn

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, weight, bias, targets, kept = ctx.saved_tensors
        head, kept_tokens, temperature, entropy_gradient = ctx.given
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(each, dtype=dtype) if needed else None
            for each, dtype, needed in zip(
                (hidden, weight, bias), (hidden.dtype, kept.dtype, kept.dtype), ctx.needs_input_grad[:3], strict=True
            )
        )
        for start in range(0, len(hidden), head.tokens):
            chunk = slice(start, start + head.tokens)
            h, t, (_, entropy, total) = hidden[chunk], targets[chunk, None], kept[:, chunk, None]
            of_logprob, of_entropy = gradient[0, :, chunk, None]
            output = linear(h, weight, bias)
            with torch.enable_grad():
                logits = head.tail(output.requires_grad_())
            d = _scaled(logits.detach(), temperature, kept_tokens, start).sub_(total)
            scale = of_logprob
            if entropy_gradient:
                scale = (d + entropy).mul_(of_entropy).add_(of_logprob)
            d = d.exp_().mul_(scale).neg_().scatter_add_(1, t, of_logprob).div_(temperature).to(logits.dtype)
            del scale
            if logits is not output:
                d = torch.autograd.grad(logits, output, d)[0]
            del logits, output
            if of_hidden is not None:
                of_hidden[chunk] = d @ weight
            if of_weight is not None:
                if h.dtype == of_weight.dtype:
                    of_weight.addmm_(d.T, h)
                else:
                    of_weight += d.T @ h  # sums in float32
            if of_bias is not None:
                of_bias += d.sum(0)
        rounded = (None if each is None else each.to(weight.dtype) for each in (of_weight, of_bias))
        return of_hidden, *rounded, None, None, None, None, None
