"""Prompts to token ids: text by the tokenizer, chats by the model's chat template, as transformers renders it.

encoder = PromptEncoder(Tokenizer("model/tokenizer.json"), Chat(chat_template_kwargs={"enable_thinking": False}))
encoder.encode([[{"role": "user", "content": "2+3="}]])      # as tokenizer.apply_chat_template
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, PluginError, SchemaError
from ...types import Chat
from .tokenizer import Tokenizer, read_json, token_text

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptEncoder:
    """Encodes texts and chats. ``chat``: then a text is the message of a user; default: texts are
    encoded as they are."""

    def __init__(self, tokenizer: Tokenizer, chat: Chat | None = None) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._template: ChatTemplate | None = None

    def encode(self, prompts: Sequence[Any]) -> list[npt.NDArray[np.int32]]:
        """Return the token ids of each prompt. Raises SchemaError, with its number, for a prompt that
        cannot be encoded; ConfigError for a chat without a template."""
        if self._chat is None and all(isinstance(prompt, str) for prompt in prompts):
            return self._tokenizer.encode(prompts)
        self._template = self._template or ChatTemplate(self._tokenizer.file.parent)
        texts = [self._render(number, prompt) for number, prompt in enumerate(prompts)]
        return self._tokenizer.encode(texts, special=False)

    def _render(self, number: int, prompt: Any) -> str:
        assert self._template is not None
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return self._template.render(messages, self._chat or Chat())
        except SchemaError as error:
            raise SchemaError(f"prompt {number}: {error}") from None


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

    def render(self, messages: Any, chat: Chat) -> str:
        """Return the text of a prompt for the model's answer. Raises SchemaError for invalid messages."""
        checked = [_message(number, message) for number, message in enumerate(messages)]
        if not checked or checked[-1]["role"] == "assistant":
            raise SchemaError("a chat ends with a message to answer, and this one with the assistant's, or none")
        if chat.system_prompt and checked[0]["role"] not in ("system", "developer"):
            checked = [{"role": "system", "content": chat.system_prompt}, *checked]
        tools = [dict(tool) for tool in chat.tools] or None
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        arguments: dict[str, Any] = {**self._special, "messages": checked, "tools": tools, "documents": None}
        arguments |= {"add_generation_prompt": True, **chat.chat_template_kwargs}
        try:
            return self._templates[name].render(arguments)
        except (self._error, TypeError, ValueError, LookupError, AttributeError) as error:
            raise SchemaError(f"the chat template of {self._folder} refuses it: {error}") from None

    def _raise(self, text: str) -> None:
        raise self._error(text)


def _message(number: int, message: Any) -> dict[str, Any]:
    """Return a message without empty keys: a table gives every message all keys."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise SchemaError(f"message {number} has role {role!r}; roles are {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
        raise SchemaError(f"message {number} has no text as its content: {message.get('content')!r:.80}")
    return {name: value for name, value in message.items() if value is not None}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
