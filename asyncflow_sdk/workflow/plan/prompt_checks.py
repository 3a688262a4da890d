"""Checks of a plan's prompts: each must be encoded, have an embedding for its tokens, and leave room for a response."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, PluginError, SchemaError
from ...types import Batch, Ragged
from ..data import cut_prompts
from ..loops.chat import PromptEncoder
from ..loops.tokenizer import Tokenizer, token_ids
from ..specs import Rollout
from .plan import PROMPT, Plan

MOST = 2**53
"""Largest number of rows, steps or tokens."""
ENCODED_AT_ONCE = 1000
"""Prompts in a batch of the tokenizer, which needs 100 times the memory of their ids; and of a sample."""
_NO_IDS = np.empty(0, np.int32)
_RESIZE = (
    "Name the model's own tokenizer (tokenizer=), or give the model an embedding for all its tokens:"
    " model.resize_token_embeddings(len(tokenizer)) of transformers"
)


def check_ids(name: str, data: Batch, rollout: Rollout) -> None:
    """Check prompts given as token ids."""
    if rollout.prompt != "prompt_ids" or rollout.prompt not in data:
        return
    try:
        token_ids(data, rollout.prompt)
    except SchemaError as error:
        raise ConfigError(f"{name}s: {error}") from None


def check_lengths(plan: Plan, rollout: Rollout, name: str, data: Batch) -> None:
    """Find prompts that cannot be encoded, have tokens without an embedding, or leave no room for a response, if
    tokenizer, vocabulary and context are known here."""
    if rollout.prompt not in data:
        return
    if rollout.chat is not None and isinstance(rollout.chat.tools, str) and rollout.chat.tools not in data:
        return  # the check of the columns reports it
    is_ids = data.spec(rollout.prompt).kind not in ("text", "json")
    encoder: PromptEncoder | None = None
    most = plan.prompt_limit(rollout, name)

    def _length(row: Batch) -> int:
        return int(row.ragged(rollout.prompt).lengths[0]) if encoder is None else encoder.length(row, rollout.prompt)

    if is_ids:
        lengths = _lengths(data.ragged(rollout.prompt), np.arange(data.rows), rollout, name)
    elif rollout.tokenizer:
        try:
            encoder = PromptEncoder(Tokenizer(rollout.tokenizer), rollout.chat)
            lengths = _lengths_of_texts(plan, rollout, encoder, MOST if most is None else most, name, data)
        except PluginError:  # this environment has no tokenizers: the worker checks
            return
    else:
        return
    if not lengths.all():
        empty = int((lengths == 0).argmax())
        raise ConfigError(f"{name}s: record {empty}: column {rollout.prompt!r} is empty: it has no token")
    if most is None:
        return
    context = int(rollout.config["max_position_embeddings"])
    if most < 1:
        raise ConfigError(
            f"max_tokens={context - most} leaves no room for a prompt: the model's context is {context};"
            f" say sampling=af.Sampling(max_tokens={max(context // 2, 1)})"
        )
    if plan.stream is not None and name == PROMPT:  # its later records, and with "error" the first ones
        if plan.options.long_prompts != "truncate_left":
            plan.stream.limit(_length, most)
        elif is_ids:  # texts are not encoded here only to find the empty ones
            plan.stream.limit(_length, MOST)
            plan.stream.cut(most)
        if plan.options.long_prompts != "error":
            return
    odd = np.flatnonzero(lengths > most)
    if not len(odd):
        return
    first = int(odd[0])
    text = (
        f"{name} {first} has {lengths[first]} tokens, and {len(odd)} of {len(lengths)} prompts do not fit: with"
        f" max_tokens={context - most} a prompt may have 1 to {most} tokens, since the"
        f" model's context is {context}"
    )
    if plan.options.long_prompts == "error" or (plan.options.long_prompts == "drop" and len(odd) == len(lengths)):
        others = "'truncate_left' cuts their beginnings off"
        if plan.options.long_prompts == "error":
            others = f"'drop' leaves such prompts out, {others}"
        raise ConfigError(f"{text}; long_prompts={others}")
    if plan.options.long_prompts == "drop":
        plan.change_prompts(name, data.take(lengths <= most))
    elif is_ids:
        plan.change_prompts(name, cut_prompts(data, rollout.prompt, most))
    plan.warn(
        f"{text}; {'they are left out' if plan.options.long_prompts == 'drop' else 'their beginnings are cut off'}"
    )


def _lengths(encoded: Ragged, rows: npt.NDArray[np.int64], rollout: Rollout, name: str) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each prompt. Raises ConfigError for tokens without an embedding."""
    vocabulary = rollout.config.get("vocab_size")
    beyond = encoded.values >= vocabulary if isinstance(vocabulary, int) else np.zeros(0, np.bool_)
    if encoded.values.ndim == 1 and beyond.any():
        first = int(beyond.argmax())
        row = rows[int(np.searchsorted(encoded.offsets, first, side="right")) - 1]
        raise ConfigError(
            f"{name} {row} has token {encoded.values[first]}, and the embedding of {rollout.model} has {vocabulary}"
            f" tokens. {_RESIZE}"
        )
    return encoded.lengths


def _lengths_of_texts(
    plan: Plan, rollout: Rollout, encoder: PromptEncoder, most: int, name: str, data: Batch
) -> npt.NDArray[np.int64]:
    """Encode a sample of the prompts, and all possibly too long ones. Return the number of tokens of each, 1 of
    others. A worker puts aside a prompt it cannot encode. Raises ConfigError if these are more than
    ``max_failed``."""
    tokenizer, vocabulary, refused = encoder.tokenizer, rollout.config.get("vocab_size"), dict[int, str]()
    column = data.columns[rollout.prompt]
    assert column.offsets is not None
    sizes = np.diff(column.offsets)
    lengths = np.ones(len(sizes), np.int64)

    def _encode(rows: npt.NDArray[np.int64]) -> Ragged:
        encoded = encoder.encode_rows(data.take(rows), rollout.prompt)
        refused.update({int(row): str(e) for row, e in zip(rows, encoded, strict=True) if isinstance(e, SchemaError)})
        ids = Ragged.of([_NO_IDS if isinstance(each, SchemaError) else each for each in encoded], np.int32)
        lengths[rows] = [
            1 if row in refused else length
            for row, length in zip(rows, _lengths(ids, rows, rollout, name), strict=True)
        ]
        return ids

    count = min(len(sizes), ENCODED_AT_ONCE)
    sample = np.arange(count) * len(sizes) // count
    ids = _encode(sample)
    larger = isinstance(vocabulary, int) and tokenizer.size > vocabulary
    more = max(int((ids.lengths - sizes[sample]).max()), 0)  # tokens of a template; no tokenizer makes two of a byte
    doubtful = (sizes == 0) | (sizes + more > (0 if larger else most))
    doubtful[sample] = False
    rest = np.flatnonzero(doubtful)
    for start in range(0, len(rest), ENCODED_AT_ONCE):
        _encode(rest[start : start + ENCODED_AT_ONCE])
    if refused:
        row = min(refused)
        text = f"{name} {row}: {refused[row]}"
        if len(refused) > plan.options.max_failed * (count + len(rest)):
            raise ConfigError(f"{name}s: {text}")
        plan.warn(
            f"{len(refused)} of {count + len(rest)} {name}s are put aside, since they cannot be encoded: {text}"
        )
    if larger:
        plan.warn(
            f"{tokenizer.file} has {tokenizer.size} tokens, and the embedding of {rollout.model} {vocabulary}: a text"
            f" with one of the others fails. {_RESIZE}"
        )
    _warn_of_tokens(plan, rollout, tokenizer, ids, data.take(sample))
    return lengths


def _warn_of_tokens(plan: Plan, rollout: Rollout, tokenizer: Tokenizer, ids: Ragged, sample: Batch) -> None:
    """Warn of special tokens in texts."""
    if tokenizer.is_doubled(ids):
        plan.warn(
            f"prompts of {rollout.task} begin with the token for the beginning of a text, and {tokenizer.file} adds"
            " it once more: remove it from the prompts' text, or give token ids in a column prompt_ids"
        )
        return
    taken = sample.take(ids.lengths > 0)  # the others are refused
    texts = taken.texts(rollout.prompt) if taken.spec(rollout.prompt).kind == "text" else []
    if rollout.chat is None and any(map(tokenizer.control.find, texts)):
        plan.warn(
            f"prompts of {rollout.task} are texts, and control tokens in them are read as such; in the texts of chats"
            " they are not"
        )
