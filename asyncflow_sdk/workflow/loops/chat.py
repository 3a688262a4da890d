"""Prompts to token ids: text by the tokenizer, chats by the model's chat template, as transformers renders it.

encoder = PromptEncoder(Tokenizer("model/tokenizer.json"), Chat(chat_template_kwargs={"enable_thinking": False}))
encoder.encode([[{"role": "user", "content": "2+3="}]])      # as tokenizer.apply_chat_template
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, PluginError, SchemaError
from ...types import Batch, Chat
from .tokenizer import Tokenizer, read_json, token_text

Encoded: TypeAlias = npt.NDArray[np.int32] | SchemaError  # the token ids of a prompt, or the reason why it has none
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers marks the end of an unfinished message


class PromptEncoder:
    """Encodes texts and chats. ``chat``: then a text is the message of a user; default: texts are
    encoded as they are, with their control tokens."""

    def __init__(self, tokenizer: Tokenizer, chat: Chat | None = None) -> None:
        self.tokenizer, self.chat = tokenizer, chat or Chat()
        self._whole = chat is None
        self._template: ChatTemplate | None = None

    def encode(self, prompts: Sequence[Any], tools: Sequence[Any] | None = None) -> list[Encoded]:
        """Return the token ids of each prompt, or its error.
        ``tools``: schemas for each chat. Raises ConfigError for a chat without a template."""
        if self._whole and all(isinstance(prompt, str) for prompt in prompts):
            return self._tokens(prompts, special=True)
        self._template = self._template or ChatTemplate(self.tokenizer.file.parent)
        encoded = [self._render(*each) for each in zip(prompts, tools or itertools.repeat(None), strict=False)]
        ids = iter(self._tokens([each for each in encoded if isinstance(each, str)], special=False))
        return [next(ids) if isinstance(each, str) else each for each in encoded]

    def encode_rows(self, rows: Batch, column: str) -> list[Encoded]:
        """Encode the prompts in a column of texts or chats, with the tools of each in their column."""
        tools = list(rows[self.chat.tools]) if isinstance(self.chat.tools, str) else None
        return self.encode(list(rows[column]), tools)

    def length(self, row: Batch, column: str) -> int:
        """Return the number of tokens of a row's prompt; 1 if it cannot be encoded."""
        (ids,) = self.encode_rows(row, column)
        return 1 if isinstance(ids, SchemaError) else len(ids)

    def _render(self, prompt: Any, tools: Any) -> Any:
        """Return the text of a chat; its ids if it has control tokens in its messages; or an error."""
        assert self._template is not None
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            given = self._template.arguments(messages, self.chat, tools)
            text, hidden = self._template.render(given), None
            if not self.chat.control_tokens:
                hidden = self.tokenizer.control.hidden({name: given[name] for name in ("messages", "tools")})
            if hidden is None:
                return text
            inner, restore = hidden
            restored, spans = restore(self._template.render({**given, **inner}))
            if restored != text:
                raise SchemaError("its messages hold control tokens, and the chat template changes them")
            return np.array(self.tokenizer.control.encode(text, spans), np.int32)
        except SchemaError as error:
            return error

    def _tokens(self, texts: Sequence[str], special: bool) -> list[Encoded]:
        try:
            return list(self.tokenizer.encode(texts, special=special))
        except SchemaError as error:
            if len(texts) == 1:
                return [error]
            return [each for text in texts for each in self._tokens([text], special)]


class ChatTemplate:
    """The chat template of a tokenizer's ``folder``. Raises ConfigError if it has none or an invalid
    one, PluginError without jinja2."""

    def __init__(self, folder: Path) -> None:
        try:
            import jinja2
            from jinja2 import nodes
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise PluginError("chats need jinja2; install it with: pip install 'asyncflow-sdk[text]'") from None

        class GenerationTag(Extension):  # marks the assistant's text; a prompt has nothing to mark
            tags = {"generation"}  # noqa: RUF012 - jinja2's

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

        self._folder, self._error = folder, jinja2.TemplateError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = self._raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        config = read_json(folder / "tokenizer_config.json") | read_json(folder / "special_tokens_map.json")
        self._special = {name: token_text(config[name]) for name in _SPECIAL if config.get(name) is not None}
        sources = self._sources(config)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {folder} is no template of jinja2: {error}") from None

    def _sources(self, config: Mapping[str, Any]) -> dict[str, str]:
        file, found = self._folder / "chat_template.jinja", config.get("chat_template")
        if file.is_file():
            return {"default": file.read_text(encoding="utf-8")}
        if isinstance(found, list):
            return {each["name"]: each["template"] for each in found}
        if not found:
            raise ConfigError(
                f"{self._folder} has no chat template (chat_template.jinja): a base model takes prompts as text. Give"
                " text, or the tokenizer of an instruction-tuned model"
            )
        return {"default": str(found)}

    def arguments(self, messages: Any, chat: Chat, tools: Any = None) -> dict[str, Any]:
        """Return the arguments of a prompt. ``tools``: this chat's schemas, as records or JSON. Raises
        SchemaError for invalid messages."""
        checked = [_message(number, message) for number, message in enumerate(messages)]
        if not checked:
            raise SchemaError("a chat has a message, and this one has none")
        if chat.system_prompt and checked[0]["role"] not in ("system", "developer"):
            checked = [{"role": "system", "content": chat.system_prompt}, *checked]
        continues = checked[-1]["role"] == "assistant"
        if continues and checked[-1].get("content") is None:
            text = "a chat ends with a message to answer or text to continue, and this one with calls of tools"
            raise SchemaError(text)
        if not self._takes_parts:
            checked = list(map(_joined, checked))
        found: dict[str, Any] = {**self._special, "messages": checked, "documents": None}
        found["tools"] = _schemas(tools or (() if isinstance(chat.tools, str) else chat.tools))
        return found | {"add_generation_prompt": not continues, **chat.chat_template_kwargs}

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of a prompt: for the model's answer, or up to the end of an assistant's last message.
        Raises SchemaError if the template refuses it."""
        messages, last = list(arguments["messages"]), arguments["messages"][-1]
        continues = last["role"] == "assistant"
        if continues:
            messages[-1] = {**last, "content": _continued(last["content"])}
        name = "tool_use" if arguments["tools"] and "tool_use" in self._templates else "default"
        try:
            text = self._templates[name].render({**arguments, "messages": messages})
        except (self._error, TypeError, ValueError, LookupError, AttributeError) as error:
            raise SchemaError(f"the chat template of {self._folder} refuses it: {error}") from None
        if not continues:
            return text
        end = text.rfind(_CONTINUED.strip())
        if end < 0 or _last_text(last["content"]).strip() not in text:
            raise SchemaError(f"the chat template of {self._folder} changes the assistant's message to continue")
        return text[:end] if text.startswith(_CONTINUED, end) else text[:end].rstrip()

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """True if the template takes a list of parts as the content of a message."""
        forms = ("?", [{"type": "text", "text": "?"}])
        chats = ({"messages": [{"role": "user", "content": each}], "tools": None, **self._special} for each in forms)
        try:
            as_text, as_parts = map(self.render, chats)
        except SchemaError:
            return False
        return as_text == as_parts

    def _raise(self, text: str) -> None:
        raise self._error(text)


def _message(number: int, message: Any) -> dict[str, Any]:
    """Return a message without empty keys: a table gives every message all keys."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise SchemaError(f"message {number} is no message with a role: {message!r:.80}")
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else [{"type": "text", "text": content}]
    text = all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    )
    if not (text and parts) and (content is not None or not message.get("tool_calls")):
        raise SchemaError(f"message {number} has no text as its content: {content!r:.80}")
    found: dict[str, Any] = _filled(message)
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _filled(value: Any) -> Any:
    """Return nested records without keys of None: a table gives every record all keys."""
    if isinstance(value, Mapping):
        return {name: _filled(each) for name, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, (list, tuple)) else value


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def _last_text(content: Any) -> str:
    return str(content if isinstance(content, str) else content[-1]["text"])


def _continued(content: Any) -> Any:
    text = _last_text(content) + _CONTINUED
    return text if isinstance(content, str) else [*content[:-1], {**content[-1], "text": text}]


def _schemas(tools: Any) -> list[dict[str, Any]] | None:
    """Return the schemas of tools; None without any. Raises SchemaError."""
    try:
        found = json.loads(tools) if isinstance(tools, str) and tools else tools or []
    except ValueError as error:
        raise SchemaError(f"its tools are not JSON: {error}") from None
    if not isinstance(found, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in found):
        raise SchemaError(f"its tools are no list of schemas: {found!r:.80}")
    return [_filled(tool) for tool in found] or None


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
