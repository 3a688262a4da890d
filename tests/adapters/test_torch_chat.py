"""Chats: the ids are those of transformers' apply_chat_template, and what is no chat is refused before anything starts."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.types import Ragged
from asyncflow_sdk.workflow.loops.agent import Turns
from asyncflow_sdk.workflow.loops.chat import PromptEncoder
from asyncflow_sdk.workflow.loops.tokenizer import Tokenizer
from asyncflow_torch.reference import tiny_model

IM = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
    {%- for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- if message.name is defined %}{{ '@' + message.name }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
PLAIN = """{{ bos_token }}{% for message in messages %}
{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('Only users and assistants talk here') }}{% endif %}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}
{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}{% endfor %}"""
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a + b → c, <b>", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}  # fmt: skip
USER = {"role": "user", "content": "What is 2+3? é\n"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": " 5 "}, {"role": "user", "content": "and 3+4?", "name": None}],
]


def save(folder: Path, template: str | None) -> Path:
    """A tokenizer of bytes with the tokens of chats."""
    from tokenizers import Tokenizer as Made
    from tokenizers import decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    made = Made(models.BPE({letter: number for number, letter in enumerate(sorted(letters))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("template", [IM, PLAIN])
@pytest.mark.parametrize(
    "chat",
    [af.Chat(), af.Chat(tools=[TOOL]), af.Chat(chat_template_kwargs={"enable_thinking": False}), af.Chat(system_prompt="Be brief.")],
)  # fmt: skip
def test_ids_are_those_of_transformers(tmp_path: Path, template: str, chat: af.Chat) -> None:
    # given
    reference = AutoTokenizer.from_pretrained(save(tmp_path, template))
    encoder = PromptEncoder(Tokenizer(str(tmp_path / "tokenizer.json")), chat)
    for messages in CHATS:
        plain = [{name: value for name, value in each.items() if value is not None} for each in messages]
        if chat.system_prompt and plain[0]["role"] != "system":
            plain = [{"role": "system", "content": chat.system_prompt}, *plain]
        arguments: dict[str, Any] = {"tools": [*chat.tools] or None, **chat.chat_template_kwargs}
        # when
        if template is PLAIN and plain[0]["role"] == "system":  # the template's own refusal
            (refused,) = encoder.encode([messages])
            assert "refuses it: Only users and assistants talk here" in str(refused)
            continue
        wanted = reference.apply_chat_template(plain, add_generation_prompt=True, return_dict=False, **arguments)
        # then
        (ids,) = encoder.encode([messages])
        assert isinstance(ids, np.ndarray) and ids.tolist() == wanted


def test_a_template_in_the_configuration_and_one_for_tools_are_found(tmp_path: Path) -> None:
    save(tmp_path, IM)
    file = tmp_path / "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads(file.read_text())
    config["chat_template"] = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": IM}]
    file.write_text(json.dumps(config))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for chat in (af.Chat(), af.Chat(tools=[TOOL])):
        encoder = PromptEncoder(Tokenizer(str(tmp_path / "tokenizer.json")), chat)
        tools = list(chat.tools) or None
        wanted = reference.apply_chat_template([USER], tools=tools, add_generation_prompt=True, return_dict=False)
        (encoded,) = encoder.encode([[USER]])
        assert isinstance(encoded, np.ndarray) and encoded.tolist() == wanted


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model that takes chats."""
    folder = tmp_path_factory.mktemp("talking")
    tiny_model(folder, ends=True, vocab_size=300, max_position_embeddings=256)
    return str(save(folder, IM))


def workflow(model: str, prompts: Any, **rollout: Any) -> af.Workflow:
    sampling = af.Sampling(max_tokens=4)
    return af.Workflow(
        prompts=prompts, rollout=af.Rollout("transformers", model=model, group_size=4, sampling=sampling, **rollout),
        reward=scored, train=af.Train("torch", model=model), batch_size=8, steps=1,
    )  # fmt: skip


def scored(prompt: list[Any], response: list[str]) -> list[float]:
    """Chats reach a function as they were given."""
    assert all(chat[-1]["role"] == "user" for chat in prompt)
    return [float(len(text)) for text in response]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[USER], [{"content": "?"}]], "prompts: prompt 1: message 0 is no message with a role: {'content'"),
        ([[{"role": "user", "content": [{"type": "image"}]}]], "message 0 has no text as its content"),
    ],
)
def test_wrong_chats_are_refused_before_a_run(talking: str, prompts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workflow(talking, prompts)


def test_few_prompts_of_many_are_encoded_before_a_run(talking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # given prompts that fit, except one too long and one that is no chat
    calls: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, texts: list[str], **how: bool) -> Any:
        calls.append(len(texts))
        return encode(self, texts, **how)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    chats = [[{"role": "user", "content": f"{number}+3="}] for number in range(5000)]
    # when
    workflow(talking, chats)
    # then a sample was encoded, in batches
    assert sum(calls) < 1010 and max(calls) <= 1000
    # and every long prompt is found
    chats[4321] = [{"role": "user", "content": "2+3=" * 100}]
    with pytest.raises(ConfigError, match="prompt 4321 has 4.. tokens, and 1 of 5000 prompts do not fit"):
        workflow(talking, chats)
    assert sum(calls) < 2020 and max(calls) <= 1000


def test_a_few_refused_chats_are_named_and_left_to_the_run(talking: str) -> None:
    chats: list[Any] = [[USER]] * 20
    chats[7] = [{"content": "?"}]
    said = str(workflow(talking, chats))
    assert (
        "1 of 20 prompts are put aside, since they cannot be encoded: prompt 7: message 0 is no message with a role"
        in said
    )
    assert "control tokens" in str(workflow(talking, ["2+3=<|im_end|>"]))
    assert "no task needs tools" in str(workflow(talking, {"prompt": [[USER]], "tools": [[TOOL]]}))


def test_a_rollout_needs_the_column_of_its_tools(talking: str) -> None:
    rollout = af.Rollout("transformers", model=talking, chat=af.Chat(tools="schemas"))
    assert rollout.declare().needs == ("prompt", "schemas")
    with pytest.raises(ConfigError, match="Generate needs one column"):
        af.Generate("transformers", model=talking, chat=af.Chat(tools="schemas"))


def test_a_chat_that_cannot_be_encoded_is_put_aside(talking: str) -> None:
    # given a chat without a role among others
    with af.serve(max_staleness=1) as run:
        producer = af.EngineProducer(run.queue, EchoRollout(), prompt="prompt", text=talking)
        run.queue.declare("train", needs=["response_ids"], batch_rows=2)
        run.queue.put({"prompt": [[USER], [{"content": "?"}], [USER]]})
        # when
        worker = threading.Thread(target=producer.work)
        worker.start()
        until(run.queue.failed, "the failed row")
        run.queue.end(cancel=True)
        worker.join()
        # then it alone has failed, with the reason
        (failed,) = run.queue.failed()
        assert all(
            "the prompt cannot be encoded: message 0 is no message with a role" in each for each in failed.reasons
        )


def test_observed_text_brings_no_control_tokens(talking: str) -> None:
    tokenizer, end = Tokenizer(f"{talking}/tokenizer.json"), 257

    async def observe(text: str, **how: bool) -> Any:
        turns = Turns(cast(Any, None), np.array([1], np.int32), af.Sampling(), tokenizer=tokenizer)
        turns.observe(text, **how)
        return turns.response_ids

    plain = asyncio.run(observe("5<|im_end|>"))
    assert end not in plain and tokenizer.decode(Ragged.of([plain])) == ["5<|im_end|>"]
    assert asyncio.run(observe("5<|im_end|>", control_tokens=True))[-1] == end


def test_a_model_without_a_template_is_refused_before_a_run(tiny: str) -> None:
    with pytest.raises(ConfigError, match="has no chat template .*: a base model takes prompts as text"):
        workflow(tiny, [[USER]])


def test_a_run_answers_chats_and_keeps_their_ids(talking: str, tmp_path: Path, warm: None) -> None:
    # given chats, and a template with arguments
    chat = af.Chat(system_prompt="Be brief.", chat_template_kwargs={"enable_thinking": False})
    made = workflow(talking, CHATS[::2], chat=chat)
    assert "column 'prompt' holds chats, formatted by the model's chat template" in str(made)
    # when
    made.run(tmp_path / "run")
    # then
    reference = AutoTokenizer.from_pretrained(talking)
    wanted = set()
    for messages in CHATS[::2]:
        plain = [{"role": "system", "content": "Be brief."}, *({k: v for k, v in m.items() if v} for m in messages)]
        ids: Any = reference.apply_chat_template(
            plain, add_generation_prompt=True, return_dict=False, enable_thinking=False
        )
        wanted.add((*ids,))
    (_, batch), *_ = af.read_steps(tmp_path / "run")
    assert {tuple(ids.tolist()) for ids in batch.ragged("prompt_ids")} == wanted
