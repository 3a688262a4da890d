"""FSDP: the plain engine's numbers from shards, in a bounded memory, from any number of ranks to any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Child
from family_folders import family_folder, same, tensors_in
from rank_runs import check_giving, chunked, counting
from ranks_children import gives_up_parts
from safetensors import safe_open
from safetensors.torch import load_file
from step_parts import Faulty, FaultyPPO, OfGroups, apart, gradients, groups_of, in_parts, state, step_rows, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncflow_sdk.algorithms import GRPO, GSPO, KL, PPO, Critic, OffPolicy
from asyncflow_sdk.errors import ConfigError, EngineError, SchemaError
from asyncflow_sdk.interfaces import TrainEngine
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.conformance import checks_of
from asyncflow_sdk.testing.kit.ranks import RankProcesses
from asyncflow_sdk.testing.kit.train.lab import Tensors, copied, distance
from asyncflow_sdk.types import Batch, Ragged, to_torch
from asyncflow_sdk.workflow.processes.ranks import free_port
from asyncflow_torch.export import export_folder
from asyncflow_torch.folder_map import FolderMap, runs_of
from asyncflow_torch.ranks import Ranks as TorchRanks
from asyncflow_torch.reference import tiny_model

TorchEngine: Any = registry().get("train", "torch").load()
FsdpEngine: Any = registry().get("train", "fsdp").load()
RANKS = RankProcesses(FsdpEngine, 2)
"""Two processes, for all tests here."""
OPTIONS = {"threads": 1, "learning_rate": 1e-3}
EXACT, NEAR = 0.0, 1e-5
"""Of the metrics of a first step, as a part of their size."""
SAME_WAY = 5e-3
"""Of later ones, and of the updates' distance as a part of how far they went: Adam divides by gradients that may be rounding only."""


pytestmark = pytest.mark.usefixtures("warm")
OF_TWO = ("memory", "small_updates")
"""Checks of two ranks only: they take long, and one rank makes the plain engine's steps to the bit."""
CHECKS = [each.name for each in checks_of("train") if each.tier != "chaos" and each.name not in OF_TWO]
one_rank = Conformance("train", FsdpEngine, options=OPTIONS, only=CHECKS)
two_ranks = Conformance("train", RANKS, options=OPTIONS)


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    RANKS.close()


@one_rank.parametrize
def test_one_process_conforms(check: Any) -> None:
    check()


@two_ranks.parametrize
def test_two_processes_conform(check: Any) -> None:
    check()


@pytest.fixture
def two() -> Iterator[Callable[..., TrainEngine]]:
    """Makes engines of two ranks, one after the other, in the same two processes."""

    def make(folder: str, factory: Any = FsdpEngine, algorithm: Any = None, **options: Any) -> TrainEngine:
        RANKS.path = f"{factory.__module__}:{factory.__qualname__}"
        return RANKS(model=folder, algorithm=algorithm or GRPO(), **OPTIONS | options)

    yield make
    RANKS.path = f"{FsdpEngine.__module__}:{FsdpEngine.__qualname__}"


def _weights(engine: TrainEngine) -> Tensors:
    return {name: copied(tensor) for name, tensor in engine.named_weights()}


def _trained(engine: TrainEngine, batch: Batch, steps: int = 2) -> tuple[list[dict[str, float]], Tensors, Tensors]:
    before = _weights(engine)
    metrics = [engine.train_step(batch).metrics for _ in range(steps)]
    after = _weights(engine)
    engine.close()
    return metrics, before, after


def _near(have: Any, want: Any, tolerance: float) -> None:
    for step, (mine, theirs) in enumerate(zip(have[0], want[0], strict=True)):
        allowed = SAME_WAY if step and tolerance else tolerance
        assert mine == pytest.approx(theirs, rel=allowed, abs=allowed)
    assert distance(want[2], want[1]) > 0
    assert distance(have[2], want[2]) <= (SAME_WAY if tolerance else 0.0) * distance(want[2], want[1])


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with weights of a single row: of two ranks one has nothing of them."""
    return tiny_model(tmp_path_factory.mktemp("narrow"), ends=True, intermediate_size=1)


@pytest.mark.parametrize("model", ["tiny", "tied", "learned", "narrow"])
def test_one_process_makes_the_plain_engines_steps_to_the_bit_and_two_nearly(
    model: str, two: Any, batch: Batch, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    plain = _trained(TorchEngine(folder, learning_rate=1e-3), batch)

    one = _trained(FsdpEngine(folder, learning_rate=1e-3), batch)
    both = _trained(two(folder), batch)

    _near(one, plain, EXACT)
    _near(both, plain, NEAR)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_tokens": 50},
        {"packed": True},
        {"packed": True, "micro_batch_tokens": 30},
        {"gradient_checkpointing": True},
        {"reshard_after_forward": False, "offload": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_no_way_of_computing_a_step_makes_it_another(
    options: dict[str, Any], tiny: str, two: Any, batch: Batch
) -> None:
    plain = _trained(TorchEngine(tiny, learning_rate=1e-3), batch)

    _near(_trained(two(tiny, **options), batch), plain, NEAR)


@pytest.mark.parametrize("model", ["tiny", "tied"])
def test_log_probs_in_chunks_make_the_steps_of_full_logits_also_with_a_rank_that_has_no_rows(
    model: str, two: Any, batch: Batch, request: pytest.FixtureRequest
) -> None:
    # given a group for one rank, and five for the other, which needs more passes
    folder, given = request.getfixturevalue(model), {"temperature": 0.7, "algorithm": GRPO(entropy=0.01)}
    plain = _trained(TorchEngine(folder, learning_rate=1e-3, **given), batch)

    one = _trained(chunked(of="fsdp", model=folder, learning_rate=1e-3, **given), batch)
    both = _trained(
        two(folder, chunked, of="fsdp", micro_batch_tokens=30, gradient_checkpointing=True, **given), batch
    )
    engine = two(folder, chunked, of="fsdp", **given)
    alone = batch.take(np.flatnonzero(batch.groups == batch.groups[-1]))
    found = engine.logprobs(alone)
    engine.close()

    _near(one, plain, NEAR)
    _near(both, plain, NEAR)
    np.testing.assert_allclose(found.values, TorchEngine(folder, **given).logprobs(alone).values, rtol=0, atol=1e-6)


def test_in_bfloat16_the_same_as_the_plain_engine_and_steps_on_float32(
    tiny: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    plain = _trained(TorchEngine(tiny, learning_rate=1e-5, dtype="bfloat16"), batch, steps=1)

    one = _trained(FsdpEngine(tiny, learning_rate=1e-5, dtype="bfloat16"), batch, steps=1)
    engine = two(tiny, learning_rate=1e-5, dtype="bfloat16")
    assert engine.train_step(batch).metrics == pytest.approx(plain[0][0], rel=1e-3, abs=1e-5)
    engine.save(tmp_path)

    # then what is given is bfloat16, and what is saved has what was too little for it
    _near(one, plain, EXACT)
    given, saved = _weights(engine), load_file(tmp_path / "weights.safetensors")
    assert {str(array.dtype) for array in given.values()} == {"bfloat16"}
    name = "lm_head.weight"
    assert torch.equal(saved[name].bfloat16().view(torch.int16), torch.from_numpy(given[name].view(np.int16)))
    assert (saved[name] != saved[name].bfloat16().float()).float().mean() > 0.8
    engine.close()


def test_each_layer_is_in_shards_of_its_own(tiny: str, two: Any, batch: Batch) -> None:
    engine = two(tiny, counting, of="fsdp")

    assert engine.train_step(batch).metrics["wrapped"] == 3  # two layers, and the model around them
    engine.close()


def test_giving_saving_and_exporting_weights_takes_a_bucket_and_asks_no_rank_for_its_shards(
    tiny: str, two: Any, tmp_path: Path
) -> None:
    # given a bucket that is small beside every larger weight, and a dtype that makes a copy of each
    bucket = 1024
    engine = two(tiny, counting, of="fsdp", dtype="bfloat16", bucket_bytes=bucket)

    engine.export(tmp_path)

    with safe_open(f"{tiny}/model.safetensors", "np") as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    check_giving(tmp_path, sum(sizes), max(sizes), bucket)
    engine.close()


def test_a_checkpoint_goes_from_any_number_of_ranks_to_any_other_to_the_bit(
    tiny: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    # given two ranks under a schedule, saved in the middle of it, and what they do then
    options: dict[str, Any] = {
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_steps": 6,
    }
    engine = two(tiny, **options)
    engine.save(tmp_path / "untrained")
    begun = [engine.train_step(batch).metrics for _ in range(3)]
    engine.save(tmp_path / "two")
    wanted = [engine.train_step(batch).metrics for _ in range(2)]
    engine.close()

    # when two others load it, a bucket at a time that is small beside every larger weight
    engine = two(tiny, bucket_bytes=1000, **options)
    engine.load(tmp_path / "two")
    found = [engine.train_step(batch).metrics for _ in range(2)]
    engine.load(tmp_path / "untrained")
    anew = [engine.train_step(batch).metrics for _ in range(3)]
    engine.close()

    # then they go on to the bit, and anew from what has no moments yet
    assert found == wanted
    assert anew == begun
    assert len({step["learning_rate"] for step in wanted}) == 2

    # and one rank, which saves the very same files; and the plain engine, which has the same tensors
    alone = FsdpEngine(tiny, **options)
    alone.load(tmp_path / "two")
    alone.save(tmp_path / "one")
    assert alone.train_step(batch).metrics == pytest.approx(wanted[0], rel=NEAR, abs=NEAR)
    alone.close()
    plain = TorchEngine(tiny, **options)
    plain.load(tmp_path / "two")
    plain.save(tmp_path / "plain")
    assert plain.train_step(batch).metrics == pytest.approx(wanted[0], rel=NEAR, abs=NEAR)
    for name in ("weights.safetensors", "optimizer.safetensors", "state.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    for name in ("weights.safetensors", "optimizer.safetensors"):
        saved, theirs = (load_file(tmp_path / of / name) for of in ("two", "plain"))
        assert saved.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in saved.items())
    assert {file.name for file in (tmp_path / "two").iterdir()} == {
        "weights.safetensors",
        "optimizer.safetensors",
        "state.json",
    }

    # and what the plain engine saved, two ranks go on from
    engine = two(tiny, **options)
    engine.load(tmp_path / "plain")
    assert engine.train_step(batch).metrics == wanted[0]
    engine.close()


def test_rows_drawn_for_several_updates_are_the_same_after_a_load_on_every_rank(
    tiny: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    engine = two(tiny, updates=2)
    engine.train_step(batch)
    engine.save(tmp_path)
    wanted = [engine.train_step(batch).metrics for _ in range(2)]
    engine.close()

    engine = two(tiny, updates=2, seed=7)
    engine.load(tmp_path)

    assert [engine.train_step(batch).metrics for _ in range(2)] == wanted
    engine.close()


def test_what_is_no_checkpoint_of_this_model_is_refused_by_all_ranks(
    tiny: str, tied: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    TorchEngine(tied).save(tmp_path / "tied")
    cut = tmp_path / "cut"
    TorchEngine(tiny).save(cut)
    (cut / "weights.safetensors").write_bytes((cut / "weights.safetensors").read_bytes()[:-1])
    engine = two(tiny)
    before = _weights(engine)

    with pytest.raises(ConfigError, match=r"state\.json is missing"):
        engine.load(tmp_path)
    with pytest.raises(ConfigError, match=r"another model; these differ: lm_head\.weight"):
        engine.load(tmp_path / "tied")
    with pytest.raises(ConfigError, match="cut short"):
        engine.load(cut)
    after = _weights(engine)
    assert all((after[name] == before[name]).all() for name in before)
    engine.train_step(batch)  # none of them has ended the ranks
    engine.close()


def test_a_checkpoint_that_breaks_off_over_an_older_one_is_none(tiny: str, batch: Batch, tmp_path: Path) -> None:
    engine = FsdpEngine(tiny, learning_rate=1e-3)
    engine.save(tmp_path)
    (tmp_path / "optimizer.safetensors").unlink()
    (
        tmp_path / "optimizer.safetensors"
    ).mkdir()  # nothing can be written there: weights are of now, the rest of before

    with pytest.raises(OSError, match="Is a directory"):
        engine.save(tmp_path)

    with pytest.raises(ConfigError, match=r"state\.json is missing"):
        engine.load(tmp_path)
    engine.close()


def test_an_export_is_a_folder_that_transformers_loads_in_one_file_or_in_several(
    tiny: str, batch: Batch, two: Any, tmp_path: Path
) -> None:
    engine = two(tiny)
    engine.train_step(batch)
    engine.export(tmp_path / "out")
    wanted = _weights(engine)
    engine.close()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    folder, runs = FolderMap.of(trained, str(tmp_path / "out")), runs_of(trained).items()
    export_folder(tmp_path / "parts", folder, runs, TorchRanks.alone(), bucket_bytes=1000, file_bytes=50_000)

    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 2
    for folder in ("out", "parts"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        found = model.state_dict()
        assert all(np.array_equal(found[name].numpy(), array) for name, array in wanted.items())
        tokens = [AutoTokenizer.from_pretrained(place)("31425=")["input_ids"] for place in (tiny, tmp_path / folder)]
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5", "qwen3"])
def test_shards_are_published_exported_and_loaded_by_the_names_of_the_folder(
    name: str, batch: Batch, two: Any, make_update: Any, tmp_path: Path
) -> None:
    # given experts apart, a prefix and untrained tensors, a second name of a tied weight
    folder = family_folder(name, tmp_path / "model")
    plain, given = TorchEngine(folder), tensors_in(folder)
    engine = two(folder, bucket_bytes=1000)

    # then version 0 is the folder's bytes, and after a step the export is that version
    first = {each: to_torch(array) for each, array in _weights(engine).items()}
    assert same(first, {each: tensor for each, tensor in given.items() if each not in plain.untrained})
    engine.train_step(_stale(batch))
    trained = {each: to_torch(array) for each, array in _weights(engine).items()}
    engine.export(tmp_path / "out")
    exported = tensors_in(tmp_path / "out")
    assert not same(trained, first)
    assert same(exported, trained | {each: given[each] for each in plain.untrained})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in Path(folder).iterdir()}

    # and after a rollback each rank has version 0 again
    engine.load_weights(make_update(first))
    assert same({each: to_torch(array) for each, array in _weights(engine).items()}, first)
    engine.close()


@pytest.mark.parametrize(
    "algorithm", [Faulty(above=1.4), FaultyPPO(infinite="critic", calls=())], ids=["policy", "critic"]
)
def test_a_gradient_that_is_not_finite_on_one_rank_makes_no_step_on_any(
    algorithm: Any, tiny: str, two: Any, batch: Batch
) -> None:
    engine = two(tiny, algorithm=algorithm)
    before = _weights(engine)

    with pytest.raises(EngineError, match="grad_norm is (inf|nan); no step was made"):
        engine.train_step(batch)

    after = _weights(engine)
    assert all((after[name] == before[name]).all() for name in before)
    with pytest.raises(EngineError, match="grad_norm is"):  # and not: it has ended
        engine.train_step(batch)
    engine.close()


def test_rows_that_no_rank_has_and_rows_that_one_rank_has(tiny: str, two: Any, batch: Batch) -> None:
    # given a batch of one group: one of two ranks has nothing
    group = batch.take(np.flatnonzero(batch.groups == 1))
    plain = _trained(TorchEngine(tiny, learning_rate=1e-3), group)

    _near(_trained(two(tiny), group), plain, NEAR)

    # and of a batch without rows, all say so
    engine = two(tiny)
    with pytest.raises(SchemaError, match="the batch has no rows"):
        engine.train_step(batch.take(np.zeros(0, np.int64)))
    assert engine.train_step(group).metrics["rows_used"] == plain[0][0]["rows_used"]
    engine.close()


def test_what_is_raised_in_the_middle_of_a_step_is_told_by_all_with_its_rank(
    tiny: str, two: Any, batch: Batch
) -> None:
    engine = two(tiny, algorithm=Faulty(above=1.4, raises=True), collective_timeout_s=20)

    with pytest.raises(EngineError, match=r"(?s)rank \d of 2 failed in train_step\(\):.*KeyError: 'told to fail"):
        engine.train_step(batch)
    with pytest.raises(EngineError, match=r"logprobs\(\) is not possible: rank \d of 2 failed in train_step"):
        engine.logprobs(batch)
    engine.close()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be above 0"),
        ({"collective_timeout_s": -1}, "collective_timeout_s must be above 0"),
        ({"lr_scheduler_type": "steps"}, "lr_scheduler_type 'steps' is none of constant, linear, cosine"),
        ({"lr_scheduler_type": "linear"}, "needs max_steps"),
        ({"attention": "flash_attention_9"}, "attention 'flash_attention_9' is none of transformers: eager, fl"),
        ({"device": "tpu9"}, "device"),
    ],
)
def test_options_that_cannot_work_are_refused(tiny: str, option: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FsdpEngine(tiny, **option)
    FsdpEngine(tiny).close()  # and leave nothing behind


def test_what_algorithms_ask_for_is_the_same_of_any_number_of_ranks(two: Any, tiny: str, batch: Batch) -> None:
    # given rows that other weights drew, a reference, and an algorithm of many parts
    rng, logprobs = np.random.default_rng(3), batch.ragged("logprobs")
    columns = {
        name: Ragged(
            (logprobs.values + rng.normal(0, 0.3, len(logprobs.values))).astype(np.float32), logprobs.offsets
        )
        for name in ("logprobs", "ref_logprobs")
    }
    stale = Batch.of({name: batch[name] for name in batch} | columns, groups=batch.groups)
    algorithm = GRPO(off_policy=OffPolicy(weight="mask", low=0.8, high=1.3), kl=KL(coef=0.1), entropy=0.1)

    # when
    alone = TorchEngine(tiny, algorithm=algorithm, learning_rate=1e-3).train_step(stale).metrics
    both = two(tiny, algorithm=algorithm, micro_batch_tokens=60)
    together = both.train_step(stale).metrics
    both.close()

    # then
    assert {"importance_ess", "importance_max", "off_policy_cut", "kl", "entropy"} < alone.keys()
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-6)

    # and where each row counts alike, rows are those of all ranks
    alone = TorchEngine(tiny, algorithm=GSPO(), learning_rate=1e-3).train_step(stale).metrics
    both = two(tiny, algorithm=GSPO())
    assert both.train_step(stale).metrics == pytest.approx(alone, rel=1e-4, abs=1e-6)
    both.close()

    # and several updates a batch are so many steps, of which the later ones have a ratio
    more = two(tiny, algorithm=algorithm, updates=3)
    metrics = [more.train_step(stale).metrics for _ in range(2)]
    more.close()
    assert metrics[0]["logprob_drift"] != pytest.approx(alone["logprob_drift"], rel=1e-3)
    assert all(np.isfinite(list(each.values())).all() for each in metrics)


def _stale(batch: Batch) -> Batch:
    """Rows that other weights drew, of which some tokens were observed."""
    rng, logprobs = np.random.default_rng(3), batch.ragged("logprobs")
    drawn = rng.random(len(logprobs.values)) < 0.8
    drawn[logprobs.offsets[:-1]] = True
    other = (logprobs.values + rng.normal(0, 0.3, len(logprobs.values))).astype(np.float32)
    columns = {"logprobs": Ragged(other, logprobs.offsets), "loss_mask": Ragged(drawn, logprobs.offsets)}
    return Batch.of({name: batch[name] for name in batch} | columns, groups=batch.groups)


def _with_critic(engine: TrainEngine, batch: Batch, path: Path, steps: int) -> tuple[Any, Tensors, Tensors]:
    """Metrics of some steps, and weights of policy and critic before and after."""

    def weights(name: str) -> Tensors:
        engine.save(path / name)
        critic = load_file(path / name / "critic" / "weights.safetensors")
        return _weights(engine) | {f"critic/{name}": tensor.numpy() for name, tensor in critic.items()}

    before = weights("before")
    metrics = [engine.train_step(batch).metrics for _ in range(steps)]
    after = weights("after")
    engine.close()
    return metrics, before, after


@pytest.mark.parametrize("rows", ["all", "one group"])
def test_a_policy_and_its_critic_make_the_plain_engines_steps(
    rows: str, tiny: str, tied: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    """And so the advantages are of mean 0 and spread 1 over the tokens of both ranks, and values not of a rank's own passes."""
    given = _stale(batch if rows == "all" else batch.take(np.flatnonzero(batch.groups == 1)))
    options: dict[str, Any] = {
        "algorithm": PPO(critic=Critic(decay=0.9), entropy=0.01), "critic": tied, "critic_learning_rate": 3e-3, "learning_rate": 1e-3,
        "micro_batch_tokens": 60,
    }  # fmt: skip
    plain = _with_critic(TorchEngine(tiny, **options), given, tmp_path / "plain", 3)

    one = _with_critic(FsdpEngine(tiny, **options), given, tmp_path / "one", 3)
    both = _with_critic(two(tiny, **options), given, tmp_path / "two", 3)

    assert {"value_loss", "critic_grad_norm"} < plain[0][0].keys()
    assert any(name.startswith("critic/") and (plain[1][name] != array).any() for name, array in plain[2].items())
    _near(one, plain, NEAR)
    _near(both, plain, NEAR)


def test_a_critic_goes_on_from_any_number_of_ranks_to_any_other(
    tiny: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"algorithm": PPO(), "updates": 2, "critic_learning_rate": 3e-3}
    engine = two(tiny, **options)
    engine.train_step(batch)
    engine.save(tmp_path / "two")
    wanted = [engine.train_step(batch).metrics for _ in range(2)]
    engine.close()

    engine = two(tiny, **options, seed=7)
    engine.train_step(batch)
    engine.load(tmp_path / "two")
    assert [engine.train_step(batch).metrics for _ in range(2)] == wanted
    with pytest.raises(ConfigError, match="critic holds no complete checkpoint"):
        engine.load(tmp_path)
    engine.close()

    went = []
    for name, made in (("one", FsdpEngine), ("plain", TorchEngine)):
        other: TrainEngine = made(tiny, learning_rate=1e-3, **options)
        other.load(tmp_path / "two")
        other.save(tmp_path / name)
        went.append(other.train_step(batch).metrics)
        other.close()
    assert went[0] == went[1]
    for name in ("weights.safetensors", "optimizer.safetensors"):
        saved = [load_file(tmp_path / of / "critic" / name) for of in ("two", "one", "plain")]
        for theirs in saved[1:]:
            assert saved[0].keys() == theirs.keys()
            assert all(torch.equal(tensor, theirs[key]) for key, tensor in saved[0].items())


def test_an_update_whose_gradient_is_not_finite_is_left_out_on_all_ranks(
    tiny: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    # given four updates, of which some have a row of the highest reward on some rank
    engine = two(tiny, algorithm=Faulty(above=1.4), updates=4)
    metrics = engine.train_step(batch).metrics
    engine.save(tmp_path)
    engine.close()

    skipped, state = metrics["updates_skipped"], load_file(tmp_path / "optimizer.safetensors")
    assert 0 < skipped < 4
    assert {float(step) for name, step in state.items() if name.startswith("step/")} == {4 - skipped}
    assert np.isfinite(list(metrics.values())).all()


SPLIT = [[3], [0], [1, 5, 2, 4]]
"""Groups of each part: of two ranks one has no rows of the first, and of the second no row has a gradient."""


@pytest.mark.parametrize(
    ("algorithm", "norm"),
    [
        (GRPO(mean="rows", kl=KL(coef=0.1), entropy=0.1), 0.01), (GSPO(clip_low=0.1, clip_high=0.1), 1e6),
        (OfGroups(), 0.01), (PPO(normalize_std=False, critic=Critic(decay=0.9)), 0.01),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_a_step_in_parts_is_the_plain_engines_whole_step_on_one_rank_and_on_two(
    algorithm: Any, norm: float, tiny: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    rows, options = (
        step_rows(batch),
        {"learning_rate": 1e-3, "dtype": "float64", "max_grad_norm": norm, "micro_batch_tokens": 60},
    )
    plain = TorchEngine(tiny, algorithm=algorithm, **options)
    wanted = plain.train_step(rows)
    saved = state(plain, tmp_path / "plain")

    for name, made in (("one", FsdpEngine), ("two", lambda folder, **given: two(folder, **given))):
        engine = made(tiny, algorithm=algorithm, **options)
        found = in_parts(engine, rows, SPLIT)
        have = state(engine, tmp_path / name)
        engine.close()

        assert apart(gradients(have), gradients(saved)) < 1e-6
        assert apart(weights(have), weights(saved)) < 1e-6
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-9)
        assert (found.filtered is None) == (wanted.filtered is None)
        if found.filtered is not None:
            order = np.concatenate([np.flatnonzero(rows.groups == group) for part in SPLIT for group in part])
            assert found.filtered.tolist() == np.asarray(wanted.filtered)[order].tolist()


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_a_step_in_parts_in_lower_precision_is_the_whole_one_up_to_rounding(
    dtype: str, near: float, tiny: str, two: Any, batch: Batch, tmp_path: Path
) -> None:
    rows, saved = step_rows(batch), []
    for number in range(2):
        engine = two(tiny, dtype=dtype, micro_batch_tokens=60, max_grad_norm=0.01)
        _ = in_parts(engine, rows, SPLIT) if number else engine.train_step(rows)
        saved.append(state(engine, tmp_path / str(number)))
        engine.close()

    assert apart(gradients(saved[1]), gradients(saved[0])) < near


def test_a_step_that_one_rank_gives_up_is_over_on_all_and_the_next_is_right(
    tiny: str, batch: Batch, tmp_path: Path
) -> None:
    """Whether the other adds a part or ends the step; and rows that one rank refuses are refused by both."""
    bad = groups_of(batch, [2])
    rewards = np.full(bad.rows, np.nan, np.float32)
    shares = [groups_of(batch, [3, 1]), groups_of(batch, [4])]
    refused = [Batch.of({name: bad[name] for name in bad} | {"reward": rewards}, groups=bad.groups), shares[1]]
    port, files = free_port(), [str(tmp_path / f"{rank}.npy") for rank in range(2)]
    for rank, file in enumerate(files):
        both = np.empty(2, object)
        both[0], both[1] = shares[rank], refused[rank]
        np.save(file, both)

    with (
        Child(gives_up_parts, tiny, 0, port, files[0]) as first,
        Child(gives_up_parts, tiny, 1, port, files[1]) as second,
    ):
        said = [[rank.hear() for _ in range(6)] for rank in (first, second)]
        assert [rank.wait() for rank in (first, second)] == [0, 0]

    assert said[0][:4] == ["went on", "went on", "StepAborted: rank 1: step 1 was aborted", "went on"]
    assert said[1][:4] == ["StepAborted: rank 0: step 1 was aborted", "went on", "went on", "went on"]
    assert [each[4].partition(" have")[0] for each in said] == [
        "SchemaError: rows 0, 1, 2, 3", "SchemaError: rank 0: rows 0, 1, 2, 3",
    ]  # fmt: skip
    wanted = TorchEngine(tiny, learning_rate=1e-3).train_step(groups_of(batch, [3, 1, 4])).metrics
    assert said[0][5] == said[1][5] == pytest.approx(wanted, rel=NEAR, abs=NEAR)
