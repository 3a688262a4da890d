"""Models by their names: from a small hub of the test's own, with its revisions, its token and its cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from echo_runs import echo_workflow

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types.safetensors import plan

pytest.importorskip("huggingface_hub")
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
FILES = {
    "config.json": b'{"max_position_embeddings": 512}',
    "tokenizer.json": b"{}",
    "model.safetensors": plan({"w": ("uint8", (1,))}).header + b"0",
    **dict.fromkeys(
        ("processor_config.json", "spiece.model", "own.tiktoken", "modeling_own.py", "README.md"), b"small"
    ),
}
OTHERS = dict.fromkeys(("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth"), b"weights")
"""Copies of the weights, in other formats."""


class Hub:
    """A hub with one public, one private and one gated model. ``asked``: the paths of its requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append(self.path)
                path = self.path.split("?")[0].strip("/")
                token = self.headers.get("Authorization")
                if "owner/gated" in path:
                    return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
                if not ("owner/open" in path or ("owner/private" in path and token == "Bearer secret")):
                    return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                if "/tree/" in path:
                    files = [
                        {"type": "file", "path": name, "size": len(body), "oid": "0" * 40}
                        for name, body in (FILES | OTHERS).items()
                    ]
                    return self._send(200, json.dumps(files).encode(), {})
                if path.startswith("api/models/"):
                    revision = path.partition("/revision/")[2] or "main"
                    commit = COMMITS.get(revision, revision)
                    if commit not in COMMITS.values():
                        return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                    siblings = [{"rfilename": name} for name in FILES | OTHERS]
                    name = "/".join(path.split("/")[2:4])
                    return self._send(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode(), {})
                commit, file = path.partition("/resolve/")[2].split("/", 1)
                body = (FILES | OTHERS)[file] + (
                    COMMITS["v1"].encode() if COMMITS.get(commit, commit) == COMMITS["v1"] else b""
                )
                etag = hashlib.sha1(body).hexdigest()
                return self._send(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMITS.get(commit, commit)})

            do_HEAD = do_GET

            def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Keep quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


SCRIPT = """
import json, sys
import asyncflow_sdk as af
OF_STAGES = {"Logprobs": {"gives": ["scores"]}, "Generate": {"needs": ["prompt_ids"], "gives": ["verdict"]}}
given = [(kind, getattr(af, kind)("echo", **options)) for kind, options in json.loads(sys.argv[1])]
plan = {"rollout": af.Rollout("echo", group_size=4, prompt="prompt_ids"), "train": af.Train("echo"), "stages": []}
for kind, spec in given:
    if kind in OF_STAGES:
        plan["stages"].append(af.Stage(spec, **OF_STAGES[kind]))
    else:
        plan[kind.lower()] = spec
if sys.argv[2] == "check":
    try:
        af.Workflow(
            prompts={"prompt_ids": [[1], [2]]}, reward=af.Stage(len, task="reward", needs=["response_ids"]),
            batch_size=4, steps=1, **plan)
    except (af.ConfigError, af.PluginError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
for _, spec in given: print(json.dumps(spec.model))
"""


def models(
    folder: Path, url: str, *given: tuple[str, dict[str, Any]], only: str = "check", **environment: str
) -> Any:
    """Check a workflow with these specs, or ``only`` make them, in another process, whose cache is below
    ``folder``. Return their models, after the error, if there is one."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    base |= {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    options = [
        (kind, {**({"group_size": 4, "prompt": "prompt_ids"} if kind == "Rollout" else {}), **o}) for kind, o in given
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options), only], env=base | environment, capture_output=True, text=True,
        timeout=120, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_workflow_downloads_each_model_once_by_name_revision_and_token(hub: Hub, tmp_path: Path) -> None:
    given: list[tuple[str, dict[str, Any]]] = [
        ("Rollout", {"model": "owner/open"}), ("Generate", {"model": "owner/open"}),
        ("Train", {"model": "owner/open", "model_revision": "v1"}), ("Logprobs", {"model": "owner/private"}),
    ]  # fmt: skip

    assert models(tmp_path, hub.url, *given, only="make") == [
        "owner/open",
        "owner/open",
        "owner/open",
        "owner/private",
    ]
    assert hub.asked == [], "making a spec uses no network"

    newest, again, tagged, private = models(tmp_path, hub.url, *given, HF_TOKEN="secret")
    assert newest == again
    assert [path.split("?")[0] for path in hub.asked].count("/api/models/owner/open/revision/main") == 1
    for folder, commit in ((newest, "main"), (tagged, "v1"), (private, "main")):
        assert folder.endswith(f"/snapshots/{COMMITS[commit]}")
        names = {path.name for path in Path(folder).iterdir()}
        assert names == FILES.keys()
    assert Path(tagged, "model.safetensors").read_bytes().endswith(COMMITS["v1"].encode())


def test_one_error_names_every_model_that_is_not_found_and_what_it_may_have_meant(hub: Hub, tmp_path: Path) -> None:
    error, *_ = models(
        tmp_path, hub.url,
        ("Rollout", {"model": "models/mine"}), ("Train", {"model": "models/mine"}),
        ("Generate", {"model": "owner/open", "model_revision": "no"}), ("Logprobs", {"model": "owner/gated"}),
    )  # fmt: skip

    assert "ConfigError: 3 things in this workflow cannot work" in error
    assert error.count("there is no folder models/mine here, and no model of that name on the hub: ") == 1
    for message in (
        "login` or HF_TOKEN",
        "model 'owner/open' has no revision 'no' at",
        "'owner/gated' is gated: accept",
    ):
        assert message in error


def test_offline_takes_the_cache_and_says_what_to_do_without(hub: Hub, tmp_path: Path) -> None:
    (folder,) = models(tmp_path, hub.url, ("Rollout", {"model": "owner/open"}))
    before = len(hub.asked)
    (again,) = models(tmp_path, hub.url, ("Rollout", {"model": "owner/open"}), HF_HUB_OFFLINE="1")
    missing, _ = models(tmp_path, hub.url, ("Rollout", {"model": "owner/private"}), HF_HUB_OFFLINE="1")
    assert again == folder
    assert "no folder owner/private here, and no model of that name in the cache" in missing
    assert "HF_HUB_OFFLINE is set: give the path of a folder, or run `hf download owner/private`" in missing
    assert len(hub.asked) == before
    # and another host, without the folder, gets the same commit
    second = tmp_path / "second"
    second.mkdir()
    (copied,) = models(
        second, hub.url, ("Rollout", {"model": folder.replace(str(tmp_path / "hf"), "/no/such/cache")})
    )
    assert copied.endswith(f"second/hf/hub/models--owner--open/snapshots/{COMMITS['main']}")


def test_a_run_says_which_commit_it_loads(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--my--open" / "snapshots" / COMMITS["v1"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    workflow = echo_workflow(rollout={"model": str(folder)})
    assert workflow.describe()["hub"] == {"owner/my--open": COMMITS["v1"]}
    assert f"commit {COMMITS['v1']} of the hub" in str(workflow)
    with pytest.raises(ConfigError, match="model_revision='v1' is of a model of the hub, and .* is a folder"):
        echo_workflow(rollout={"model": str(folder), "model_revision": "v1"})
