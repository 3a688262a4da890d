"""The hook: every plugin that works is found, and each that does not is named with package, version and cure."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from plugin_packages import HEAD, install, write_plugin

import asyncflow_sdk as af
from asyncflow_sdk.plugins import WITHOUT, Adapter, AdapterSpec, Registry, find_plugins, registry
from asyncflow_sdk.testing.echo import EchoTrain

SPEC = "    return [af.AdapterSpec(kind={kind!r}, name={name!r}, factory='x:Y'{more})]\n"
GOOD = HEAD + SPEC.format(kind="tracker", name="good", more="")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of distributions beside the installed ones, with one that works."""
    folder = tmp_path / "site"
    write_plugin(folder, "zz_good", GOOD)
    monkeypatch.syspath_prepend(folder)
    return folder


def choose(monkeypatch: pytest.MonkeyPatch, blocked: str) -> None:
    """What is found is kept, by the choice: one that no other test makes has another look."""
    monkeypatch.setenv(WITHOUT, blocked)


def the_problem(found: Registry) -> str:
    """The only one; and nobody else was stopped by it."""
    assert found.find("tracker", "good") is not None
    assert found.find("transport", "shm") is not None
    (problem,) = found.problems
    return problem


BROKEN = {
    "import_error": ("import no_such_module_here\n", "ModuleNotFoundError: No module named 'no_such_module_here'"),
    "exit": ("import sys\nsys.exit('goodbye')\n", "SystemExit: goodbye"),
    "syntax": ("def f(:\n", "SyntaxError"),
    "raises": (HEAD + "    raise OSError('no disk')\n", "OSError: no disk"),
    "nothing": (
        "x = 1\n",
        "it registers nothing: give it a function asyncflow_adapters with @asyncflow_sdk.hookimpl; it is /",
    ),
    "returns_none": (HEAD + "    pass\n", "asyncflow_adapters returned None; a list of AdapterSpec is expected"),
    "returns_one": (
        HEAD + SPEC.format(kind="tracker", name="one", more="").replace("[", "").replace("]", ""),
        "a list of AdapterSpec is expected",
    ),
    "returns_number": (HEAD + "    return 3\n", "TypeError: 'int' object is not iterable"),
    "returns_texts": (HEAD + "    return ['rollout:mine']\n", "returned 'rollout:mine', which is no AdapterSpec"),
    "misspelt": (HEAD.replace("@af.hookimpl\n", "") + "    return []\n", "it registers nothing"),
    "misses": (HEAD + "    return [af.AdapterSpec(kind='tracker', name='x')]\n", "missing 1 required keyword"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_named_with_its_cure_and_stops_no_other(site: Path, how: str) -> None:
    body, said = BROKEN[how]
    write_plugin(site, f"af_{how}", body, version="3.2")

    problem = the_problem(find_plugins())

    assert problem.startswith(f"plugin 'af_{how}' of af_{how} 3.2: ")
    assert said in problem
    assert problem.endswith(f"; pip install -U af_{how}, or leave it out: --no-plugin af_{how}")


ODD = {
    "kind": ("clock", "n", "", "kind 'clock' is not one of this SDK: rollout, train, transport"),
    "field": ("tracker", "n", ", speed=3", "it has no field 'speed' in this SDK"),
    "name": ("tracker", "a:b", "", "'a:b' is not a name"),
    "factory": ("tracker", "n", ", install=3", "install=3 is not a string"),
    "requirement": ("train", "n", ", requires=['torch >= = 2']", "requirement 'torch >= = 2' cannot be read"),
    "requires": ("train", "n", ", requires='torch'", "requires='torch' is not a list of requirements"),
    "can": (
        "rollout",
        "n",
        ", can={'swap': ['beam']}",
        "can={'swap': ['beam']}: known: drain, partial, in_flight",
    ),
    "cannot": ("tracker", "n", ", can={'fly': 'yes'}", "can={'fly': ...} is unknown to this SDK; known: none"),
}


@pytest.mark.parametrize("how", ODD)
def test_an_odd_adapter_is_left_out_and_the_others_of_its_plugin_are_not(site: Path, how: str) -> None:
    kind, name, more, said = ODD[how]
    specs = f"[af.AdapterSpec(kind={kind!r}, name={name!r}, factory='x:Y'{more}), af.AdapterSpec(kind='launcher', name='l', factory='x:Y')]"
    write_plugin(site, f"af_odd_{how}", HEAD + f"    return {specs}\n", version="0.4")

    found = find_plugins()

    problem = the_problem(found)
    assert problem.startswith(f"plugin 'af_odd_{how}' of af_odd_{how} 0.4: adapter {name!r} is left out: ")
    assert said in problem
    assert f"pip install -U asyncflow-sdk, or another version of af_odd_{how}" in problem
    assert found.find("launcher", "l") is not None


def test_of_two_adapters_with_one_name_the_first_is_taken_and_the_sdks_own_before_all(site: Path) -> None:
    write_plugin(site, "aa_first", HEAD + SPEC.format(kind="tracker", name="twice", more=""))
    write_plugin(site, "bb_second", HEAD + SPEC.format(kind="tracker", name="twice", more=", install='x'"))
    write_plugin(site, "aa_shm", HEAD + SPEC.format(kind="transport", name="shm", more=""))

    found = find_plugins()

    assert found.get("tracker", "twice").source == "aa_first 1.0"
    assert found.get("transport", "shm").spec.factory == "asyncflow_sdk.weights.transports.shm:ShmTransport"
    theirs, again = found.problems
    assert "plugin 'aa_shm' of aa_shm 1.0: transport adapter 'shm' is already registered by asyncflow-sdk" in theirs
    assert (
        "plugin 'bb_second' of bb_second 1.0: tracker adapter 'twice' is already registered by aa_first 1.0" in again
    )
    assert "uninstall one of them, or leave one out with --no-plugin" in again


@pytest.mark.parametrize(
    "asked", ["asyncflow-sdk>=9", "AsyncFlow_SDK (<0.1)", 'asyncflow-sdk>=9; python_version>"3"']
)
def test_a_plugin_for_another_sdk_is_not_even_imported(site: Path, tmp_path: Path, asked: str) -> None:
    body = f"open({str(tmp_path / 'imported')!r}, 'w')\n" + GOOD
    write_plugin(site, "af_new_sdk", body, requires=["numpy", asked])

    problem = the_problem(find_plugins())

    assert "plugin 'af_new_sdk' of af_new_sdk 1.0: it needs asyncflow-sdk" in problem
    assert f"and {af.__version__} is installed; it is for another SDK than {af.__version__}" in problem
    assert not (tmp_path / "imported").exists()


def test_a_requirement_of_an_extra_or_of_another_python_is_no_reason(site: Path) -> None:
    only = ['asyncflow-sdk>=9; extra == "x"', 'asyncflow-sdk>=9; python_version<"3"', "asyncflow-sdk>=0.0.1", "= ="]
    write_plugin(site, "af_fits", HEAD + SPEC.format(kind="tracker", name="fits", more=""), requires=only)

    found = find_plugins()

    assert found.problems == ()
    assert found.find("tracker", "fits") is not None


def test_an_old_plugin_is_found_and_its_engine_runs(site: Path) -> None:
    install(site, "asyncflow_old")

    found = find_plugins()

    assert found.problems == ()
    engine = found.get("rollout", "old").load()()
    assert isinstance(engine, af.RolloutEngine)


def test_an_old_plugin_works_in_a_run(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "asyncflow_old")
    choose(monkeypatch, "zz_good")

    with af.serve() as run:
        run.queue.put({"prompt_ids": [[1, 2], [3]]}, group_size=2)
        run.queue.end()
        run.start(af.Rollout("old", prompt="prompt_ids", group_size=2, launcher="thread"))
        run.start(af.Stage(lambda response_ids: [float(len(ids)) for ids in response_ids], task="reward"))
        trainer, publisher = EchoTrain(), run.weight_publisher("shm")
        for step in run.consumer("train", batch_size=4):
            assert sorted(step.array("reward").tolist()) == [1.0, 1.0, 2.0, 2.0]
            publisher.publish(step.version + 1, trainer.named_weights())
            step.ack()
        publisher.close()
        assert run.audit().terminal["consumed"] == 4


def test_a_plugin_of_the_future_is_taken_as_far_as_it_is_known(site: Path) -> None:
    install(site, "asyncflow_future")

    found = find_plugins()

    assert found.find("tracker", f"known-to-{af.__version__}") is not None
    text = "\n".join(found.problems)
    assert len(found.problems) == 4
    assert "plugin 'argument' of asyncflow-future 7.0: " in text
    assert "'cluster'" in text
    assert "kind 'scheduler' is not one of this SDK" in text
    assert "it has no field 'priority' in this SDK" in text
    assert "can={'teleport': ...} is unknown to this SDK" in text
    assert text.count("pip install -U asyncflow-sdk, or another version of asyncflow-future") == 4


def test_a_distribution_that_cannot_be_read_stops_no_other(site: Path) -> None:
    info = site / "torn-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(b"[asyncflow_sdk]\n\xff\xfe = x\n")

    problem = the_problem(find_plugins())

    assert "torn-1.0.dist-info cannot be read: UnicodeDecodeError" in problem


def test_what_is_wrong_is_logged_once_a_process(
    site: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, "zz-good")
    write_plugin(site, "af_logged", "raise RuntimeError('on purpose')\n")

    with caplog.at_level(logging.WARNING, "asyncflow_sdk.plugins"):
        registry()
        with pytest.raises(af.PluginError) as error:
            registry().get("rollout", "none such")

    assert [record.getMessage().count("on purpose") for record in caplog.records] == [1]
    assert "not loaded: plugin 'af_logged' of af_logged 1.0: RuntimeError: on purpose" in str(error.value)


@pytest.mark.parametrize(
    ("requires", "missing"),
    [
        (["numpy>=99"], "numpy>=99, but "),
        (
            ["no-such-thing>=1 | nor-this"],
            "no-such-thing, which is not installed; nor nor-this, which is not installed",
        ),
        (["no-such-thing>=1 | numpy>=1"], None),
        (['no-such-thing; python_version < "3"'], None),
    ],
)
def test_an_engine_that_is_missing_or_too_old_is_told_with_the_pip_line(
    requires: list[str], missing: str | None
) -> None:
    adapter = Adapter(AdapterSpec(kind="rollout", name="x", factory="json:loads", requires=requires), "mine 1.0")

    if missing is None:
        assert adapter.missing == []
        return
    assert adapter.missing[0].startswith(missing)
    with pytest.raises(af.PluginError, match=r"Install with: pip install '(numpy>=99|no-such-thing>=1)'"):
        adapter.load()


def test_an_engine_that_exits_on_import_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exiting_engine.py").write_text("raise SystemExit('no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)

    spec = AdapterSpec(kind="train", name="x", factory="exiting_engine:E", requires=["numpy>=1"])
    with pytest.raises(af.PluginError, match=r"importing 'exiting_engine:E' failed: SystemExit: no GPU$"):
        Adapter(spec, "mine 1.0").load()  # what it needs is there, and no pip line would help
