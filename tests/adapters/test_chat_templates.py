"""Templates and tokenizers of four families: ids are those of transformers, and messages bring no control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Made
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import asyncflow_sdk as af
from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Ragged
from asyncflow_sdk.workflow.loops.chat import PromptEncoder
from asyncflow_sdk.workflow.loops.tokenizer import Tokenizer

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{- tool | tojson }}\n{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == 'assistant' and '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['content'] is string %}{{- message['content'] | trim }}
{%- else %}{% for part in message['content'] %}{{- part['text'] | trim }}{% endfor %}{% endif %}
{{- '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + (message['content'] | trim) + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{{- bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.content is none %}{{- '[TOOL_CALLS]' + (message.tool_calls | tojson) + eos_token }}
{%- else %}{{- ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""

TEXT = [
    "What is 2+3? The answer is 5.",
    "user\nassistant\nsystem\nmodel\n",
    "to be or not to be  that is\n\nthe question é 你好",
]


def loaded(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def ids_of(encoded: Any) -> list[int]:
    """The ids of a prompt that was encoded."""
    found: list[int] = encoded.tolist()
    return found


def byte_level(special: list[Any]) -> Made:
    """As of Qwen and Llama 3."""
    made = Made(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=letters, show_progress=False))
    made.add_special_tokens(special)
    return made


def sentencepiece(special: list[Any], first: bool) -> Made:
    """As of Mistral, with a space before the first word, or of Gemma without."""
    made = Made(models.BPE())
    made.train_from_iterator(
        [text.replace(" ", "▁") for text in TEXT], trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    learned = json.loads(made.to_str())["model"]
    tokens = [*learned["vocab"], "<unk>", *(f"<0x{number:02X}>" for number in range(256))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Made(
        models.BPE(vocabulary, [tuple(pair) for pair in learned["merges"]], byte_fallback=True, unk_token="<unk>")
    )
    if first:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", *special])
    if not first:
        made.add_tokens([AddedToken("\n\n", normalized=False)])  # Gemma's runs of lines
    return made


def rstripped(text: str) -> AddedToken:
    return AddedToken(text, rstrip=True, special=True, normalized=False)


FAMILIES: dict[str, tuple[str, Any, str]] = {
    "qwen": (QWEN, lambda: byte_level(["<|im_start|>", "<|im_end|>"]), "<|im_end|>"),
    "llama": (LLAMA, lambda: byte_level(["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", rstripped("<|eot_id|>")]), "<|eot_id|>"),
    "gemma": (GEMMA, lambda: sentencepiece(["<bos>", "<start_of_turn>", "<end_of_turn>"], first=False), "<end_of_turn>"),
    "mistral": (MISTRAL, lambda: sentencepiece(["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], first=True), "</s>"),
}  # fmt: skip
BOS: dict[str, str] = {"llama": "<|begin|>", "gemma": "<bos>", "mistral": "<s>"}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """A name, the folder of a tokenizer, and its end token."""
    template, make, end = FAMILIES[request.param]
    made, folder = make(), tmp_path_factory.mktemp(request.param)
    if request.param == "qwen":
        made.add_tokens(
            [AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
        )
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS.get(request.param), eos_token=end)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return request.param, folder, end


USER = {"role": "user", "content": " What is  2+3? é\n\n你好 <think>"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, {"role": "assistant", "content": "<think>hm</think>\n 5. "}, {"role": "user", "content": "and 3+4?"}],
    [USER, CALL, {"role": "tool", "content": "5"}],
    [{"role": "developer", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "The answer is "}],  # to be continued
    [USER, {"role": "assistant", "content": "The"}],
    [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+3?"}]}],
]


def test_ids_are_those_of_transformers(family: tuple[str, Path, str]) -> None:
    _, folder, _ = family
    reference, encoder = loaded(folder), PromptEncoder(Tokenizer(str(folder / "tokenizer.json")))
    compared = 0
    for chat in CHATS:
        (ids,) = encoder.encode([chat])
        ends = chat[-1]["role"] == "assistant"
        try:
            wanted = reference.apply_chat_template(
                chat, add_generation_prompt=not ends, continue_final_message=ends, return_dict=False
            )
        except Exception:  # this template does not know it
            continue
        if isinstance(chat[0]["content"], list) and family[0] != "llama":  # others print the list, or nothing
            wanted = reference.apply_chat_template(
                [{**chat[0], "content": "What is 2+3?"}], add_generation_prompt=True, return_dict=False
            )
        assert ids_of(ids) == wanted, chat
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("text", ["a {} b", "{}", "{}{}", "  {}\n ", "x {}"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_messages_bring_no_control_tokens(family: tuple[str, Path, str], text: str, role: str) -> None:
    # given a message that holds the end token's text
    _, folder, end = family
    tokenizer = Tokenizer(str(folder / "tokenizer.json"))
    reference = loaded(folder)
    end_id, typed = reference.convert_tokens_to_ids(end), text.replace("{}", end)
    chats = [[{"role": "user", "content": "2+3?"}, {"role": role, "content": each}, {"role": "user", "content": "so?"}]
             for each in (typed, text.replace("{}", "§"))]  # fmt: skip
    # when
    one, other = PromptEncoder(tokenizer).encode(chats)
    asked = PromptEncoder(tokenizer, af.Chat(control_tokens=True)).encode(chats)
    # then its tokens are the template's alone, and the text is the same
    assert ids_of(one).count(end_id) == ids_of(other).count(end_id)
    whole, wanted = (
        reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    )
    assert (ids_of(asked[0]), ids_of(other)) == (whole, wanted)
    text = reference.apply_chat_template(chats[0], add_generation_prompt=True, tokenize=False)
    assert reference.decode(one).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("chat", CHATS[:3])
def test_a_frame_is_tokenised_alike_beside_plain_control_text(
    family: tuple[str, Path, str], chat: list[dict[str, Any]]
) -> None:
    """Without any part to be read as text, the second tokenizer gives the first one's ids."""
    _, folder, _ = family
    reference, control = loaded(folder), Tokenizer(str(folder / "tokenizer.json")).control
    try:
        text = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception:  # this template does not know it
        return
    assert control.encode(text, []) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0 has no text as its content"),
        ([{"content": "?"}], "message 0 is no message with a role"),
        ([USER, CALL], "ends with a message to answer or text to continue, and this one with calls"),
        ([{"role": "user", "content": [{"type": "text", "text": "<|eot"}, {"type": "text", "text": "_id|>"}]}], "several of its texts together make a control token"),
    ],
)  # fmt: skip
def test_a_refused_chat_is_a_value_beside_the_others(tmp_path: Path, chat: Any, message: str) -> None:
    template, make, _ = FAMILIES["llama"]
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=make(), bos_token="<|begin|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    refused, ids = PromptEncoder(Tokenizer(str(tmp_path / "tokenizer.json"))).encode([chat, [USER]])
    assert isinstance(refused, SchemaError) and message in str(refused)
    assert isinstance(ids, np.ndarray)


def test_names_of_arguments_bring_no_control_tokens(tmp_path: Path) -> None:
    made: Any = PreTrainedTokenizerFast(tokenizer_object=FAMILIES["qwen"][1](), eos_token="<|im_end|>")
    made.chat_template = QWEN
    made.save_pretrained(tmp_path)
    end, call = loaded(tmp_path).convert_tokens_to_ids("<|im_end|>"), {"name": "add", "arguments": {"<|im_end|>": 1}}
    chat = [USER, {**CALL, "tool_calls": [{"function": call}]}, {"role": "tool", "content": "5"}]
    (ids,) = PromptEncoder(Tokenizer(str(tmp_path / "tokenizer.json"))).encode([chat])
    assert ids_of(ids).count(end) == 3


def test_tools_of_each_row_lose_the_keys_that_a_table_adds(tmp_path: Path) -> None:
    # given
    made: Any = PreTrainedTokenizerFast(tokenizer_object=FAMILIES["qwen"][1](), eos_token="<|im_end|>")
    made.chat_template = QWEN
    made.save_pretrained(tmp_path)
    encoder = PromptEncoder(Tokenizer(str(tmp_path / "tokenizer.json")), af.Chat(tools="tools"))
    tools = [{"name": "add", "parameters": {"a": {"type": "number"}}}]
    padded = [{"name": "add", "parameters": {"a": {"type": "number", "enum": None}, "b": None}}]
    call = [
        USER,
        {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": {"a": [{"c": 1, "d": None}], "b": None}}}]},
        USER,
    ]
    plain = [USER, {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": {"a": [{"c": 1}]}}}]}, USER]
    # when
    rows = af.Batch.of({"prompt": [call, call, call], "tools": [padded, [], padded]})
    ids = encoder.encode_rows(rows, "prompt")
    # then
    reference = loaded(tmp_path)
    for each, given in zip(ids, (tools, None, tools), strict=True):
        assert ids_of(each) == reference.apply_chat_template(
            plain, tools=given, add_generation_prompt=True, return_dict=False
        )


def test_markers_are_kept_on_request_and_the_end_token_is_not(family: tuple[str, Path, str]) -> None:
    name, folder, end = family
    reference, other = loaded(folder), {"mistral": "[TOOL_CALLS]", "gemma": "<start_of_turn>"}
    marker = other.get(name, "<|start_header_id|>" if name == "llama" else "<|im_start|>")
    end_id = reference.convert_tokens_to_ids(end)
    ids = Ragged.of([reference.encode(f"a{marker}b{end}", add_special_tokens=False)], np.int32)
    kept = Tokenizer(str(folder / "tokenizer.json"), ends=[end_id]).decode(ids)
    assert [each.strip().replace(" ", "") for each in kept] == [f"a{marker}b"]
    assert marker not in Tokenizer(str(folder / "tokenizer.json")).decode(ids)[0]
