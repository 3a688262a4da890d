"""Parts of SGLang's adapter that need no SGLang: files of versions, checks against a folder, what a server is told."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.testing.kit.updates import HeldUpdate
from asyncflow_sglang.arguments import own_arguments, own_environment
from asyncflow_sglang.checkpoint import Checkpoint, served_checkpoint
from asyncflow_sglang.handing import Handing
from asyncflow_sglang.replies import Meta, Reason, Reply, Span, completion
from asyncflow_sglang.requests import generate_body, response_seed, token_ids

pytest.importorskip("safetensors")
pytestmark = pytest.mark.fast
TENSORS = {
    "odd": np.arange(7, dtype=np.uint8),
    "half": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "wide": np.linspace(0, 1, 5),
    "nothing": np.zeros((0, 4), np.float32),
    "scalar": np.array(3.5, np.float32),
}


@pytest.fixture
def handing() -> Iterator[Handing]:
    made = Handing()
    yield made
    made.close()


def read(handing: Handing) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of each tensor, by the format of safetensors."""
    (file,) = handing.folder.glob("*.safetensors")
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = {name: told for name, told in json.loads(raw[8:start]).items() if name != "__metadata__"}
    return {
        name: (told["dtype"], told["shape"], raw[start:][slice(*told["data_offsets"])])
        for name, told in header.items()
    }


def test_the_file_of_a_version_is_that_version_to_the_bit(handing: Handing) -> None:
    handing.write(HeldUpdate(1, TENSORS))

    kinds = {"odd": "U8", "half": "BF16", "wide": "F64", "nothing": "F32", "scalar": "F32"}
    assert read(handing) == {
        name: (kinds[name], list(array.shape), array.tobytes()) for name, array in TENSORS.items()
    }


def test_a_version_of_another_size_gets_a_file_of_its_size_and_closing_leaves_nothing(handing: Handing) -> None:
    for size in (1000, 10, 500):
        handing.write(HeldUpdate(1, {"w": np.full(size, size, np.int64)}))
        assert np.frombuffer(read(handing)["w"][2], np.int64).tolist() == [size] * size

    handing.close()
    assert not handing.folder.exists()


def test_what_somebody_may_still_be_reading_is_not_written_over(handing: Handing) -> None:
    handing.write(HeldUpdate(1, {"w": np.ones(1000)}))
    (file,) = handing.folder.glob("*.safetensors")
    with file.open("rb") as reading:
        handing.forget()
        handing.write(HeldUpdate(2, {"w": np.zeros(1000)}))
        reading.seek(-8000, 2)
        assert set(np.frombuffer(reading.read(), np.float64)) == {1.0}


def test_a_version_that_breaks_off_raises_what_it_raised(handing: Handing) -> None:
    with pytest.raises(OSError, match="told to break off"):
        handing.write(HeldUpdate(1, TENSORS, breaks_after=2))


# ---- the folder


def checkpoint(at: Path, kind: str = "Llama", dtype: str = "", **tensors: tuple[int, ...]) -> Checkpoint:
    """Of a folder with float32 tensors of these shapes."""
    from safetensors.numpy import save_file

    at.mkdir(exist_ok=True)
    (at / "config.json").write_text(
        json.dumps({"vocab_size": 9, "architectures": [kind], "tie_word_embeddings": True})
    )
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, at / "model.safetensors")
    return Checkpoint(str(at), dtype or None)


def version(dtype: Any = np.float32, **shapes: tuple[int, ...]) -> HeldUpdate:
    return HeldUpdate(1, {name.replace("__", "."): np.ones(shape, dtype) for name, shape in shapes.items()})


def test_tied_weights_may_come_once_or_twice_and_others_must_come(tmp_path: Path) -> None:
    held = checkpoint(tmp_path, a=(2, 3), b=(4,))

    held.check(version(a=(2, 3), b=(4,)))
    held.check(version(a=(2, 3), b=(4,), lm_head__weight=(2, 3)))
    with pytest.raises(af.WeightMismatch, match="b: missing from the version"):
        held.check(version(a=(2, 3)))


def test_the_servers_dtype_is_the_one_to_publish_in(tmp_path: Path) -> None:
    held = checkpoint(tmp_path, dtype="bfloat16", a=(2, 3))

    held.check(version(ml_dtypes.bfloat16, a=(2, 3)))
    checkpoint(tmp_path, dtype="float32", a=(2, 3)).check(version(a=(2, 3)))
    with pytest.raises(af.WeightMismatch, match=r"has float32\[.*the server takes bfloat16"):
        held.check(version(a=(2, 3)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / "config.json").write_text("{}"), "vocab_size"),
        (lambda path: (path / "model.safetensors").unlink(), "no weights in safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 100), "cannot be read"),
    ],
)
def test_a_folder_that_is_none_is_refused(tmp_path: Path, change: Any, why: str) -> None:
    checkpoint(tmp_path, a=(2, 3))
    change(tmp_path)

    with pytest.raises(af.ConfigError, match=why):
        Checkpoint(str(tmp_path))


# ---- what a server is told


def test_a_server_gets_the_users_options_and_what_this_adapter_needs() -> None:
    options = {
        "tp_size": 2,
        "disable_overlap_schedule": True,
        "enable_metrics": False,
        "random_seed": None,
        "cuda_graph_bs": [1, 2],
    }

    got = own_arguments("m", options, port=1, key="k", dtype="bfloat16", context=256, version=7)

    line = " ".join(got)
    for part in (
        "--tp-size 2",
        "--cuda-graph-bs 1 2",
        "--host 127.0.0.1",
        "--weight-version 7",
        "--api-key k",
        "--context-length 263",
    ):
        assert part in line
    assert "--disable-overlap-schedule" in got
    assert not {"--enable-metrics", "--random-seed"} & set(got)


def test_a_server_of_the_same_tensors_is_taken_whatever_their_values_and_dtype_are(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "one", a=(2, 3), b=(4,)), checkpoint(tmp_path / "other", b=(4,), a=(2, 3))

    one.check_alike(other, "the server")


@pytest.mark.parametrize(
    ("kind", "tensors", "why"),
    [
        ("Llama", {"a": (2, 3)}, "b: the server's model has no such weight"),
        ("Llama", {"a": (2, 3), "b": (4,), "c": (1,)}, "c: the folder has no such weight"),
        ("Llama", {"a": (3, 2), "b": (4,)}, r"a: \[2, 3\] in the folder, \[3, 2\] in the server"),
        ("Qwen3", {"a": (2, 3), "b": (4,)}, r"computes \['Qwen3'\], the folder is of \['Llama'\]"),
    ],
)
def test_a_server_of_another_model_is_refused_with_the_reason(
    tmp_path: Path, kind: str, tensors: dict[str, tuple[int, ...]], why: str
) -> None:
    ours, theirs = checkpoint(tmp_path / "ours", a=(2, 3), b=(4,)), checkpoint(tmp_path / "theirs", kind, **tensors)

    with pytest.raises(af.ConfigError, match=rf"(?s)the server serves .*/theirs.*another model than .*/ours.*{why}"):
        ours.check_alike(theirs, "the server")


def test_a_server_whose_model_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(af.ConfigError, match="the server serves 'nobody/nothing', which cannot be read here"):
        served_checkpoint("nobody/nothing", None, "the server")


@pytest.mark.parametrize("name", ["host", "api_key", "api-key", "model-path", "sampling_defaults"])
def test_options_that_are_not_the_users_are_refused(name: str) -> None:
    with pytest.raises(af.ConfigError, match=name):
        own_arguments("m", {name: "x"}, port=1, key="k", dtype="bfloat16", context=None, version=0)


def test_what_would_change_log_probs_is_off_whatever_the_workers_environment_says() -> None:
    assert own_environment()["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


def test_every_response_of_a_group_has_a_seed_of_its_own_and_the_same_one_each_time() -> None:
    seeds = {response_seed(5, number) for number in range(100)}

    assert len(seeds) == 100
    assert seeds == {response_seed(5, number) for number in range(100)}
    assert response_seed(None, 0) != response_seed(None, 0)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_everything_that_changes_a_draw_is_said() -> None:
    said = generate_body([1], af.Sampling(top_k=0))["sampling_params"]

    assert said["top_k"] == -1
    assert {"top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"} <= said.keys()


@pytest.mark.parametrize(("n", "drawn", "why"), [(0, 4, "n must be"), (9, 4, "n must be"), (1, 300, "context")])
def test_a_request_that_does_not_fit_is_refused(n: int, drawn: int, why: str) -> None:
    request = af.Request(np.array([1], np.int32), af.Sampling(max_tokens=drawn), n)

    with pytest.raises(af.EngineError, match=why):
        token_ids(request, vocabulary=43, context=256, max_rows=8)


# ---- what it answers


def reply(tokens: list[int], values: list[Any], spans: list[Span], reason: str = "length") -> Reply:
    scored = [(value, token, None) for value, token in zip(values, tokens, strict=True)]
    return Reply(Meta(Reason(reason), output_token_logprobs=scored, weight_versions=spans), tokens)


def test_spans_are_the_servers() -> None:
    got = completion(reply([1, 2, 3], [-1.0, -2.0, -0.5], [Span("4", 0, 2), Span("5", 2, 3)]), 0, interrupted=False)

    assert [tuple(span) for span in got.spans] == [(4, 0, 2), (5, 2, 3)]
    assert math.isclose(float(np.asarray(got.logprobs).sum()), -3.5)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (reply([1], [None], [Span("0", 0, 1)]), "not those of the tokens"),
        (reply([1], [-1.0], [Span("default", 0, 1)]), "no run published"),
        (reply([1, 2], [-1.0, -1.0], [Span("0", 0, 1)]), "for 2 tokens"),
        (reply([1], [-1.0], [Span("0", 0, 1)], "abort"), "nobody interrupted"),
        (Reply(Meta(Reason("stop"), output_token_logprobs=[]), [1]), "1 tokens with 0 log-probs"),
        (Reply(Meta(None), [1]), "nothing of an end"),
    ],
)
def test_an_answer_that_does_not_hold_together_is_an_error(answer: Reply, why: str) -> None:
    with pytest.raises(af.EngineError, match=why):
        completion(answer, 0, interrupted=False)


def test_an_interrupted_response_has_the_tokens_with_log_probs() -> None:
    answer = Reply(
        Meta(
            Reason("abort"),
            output_token_logprobs=[(-1.0, 7, None), (-1.0, 8, None)],
            weight_versions=[Span("0", 0, 9)],
        ),
        [7],
    )

    got = completion(answer, 0, interrupted=True)

    assert (got.finish_reason, list(got.token_ids), [tuple(span) for span in got.spans]) == (
        "aborted",
        [7],
        [(0, 0, 1)],
    )
