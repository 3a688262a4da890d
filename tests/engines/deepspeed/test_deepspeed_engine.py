"""What DeepSpeed's engine promises beyond the contract: it is the plain engine on more processes, and nothing is gathered for others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed_parts
import numpy as np
import pytest
from deepspeed_parts import RANKS, options
from rank_runs import check_giving, chunked, counting
from step_parts import Faulty, FaultyPPO, OfGroups, apart, gradients, groups_of, in_parts, state, weights

from asyncflow_sdk.algorithms import GRPO, GSPO, PPO, Critic
from asyncflow_sdk.errors import AsyncFlowError, EngineError
from asyncflow_sdk.testing.kit.train.lab import TrainLab, distance, unlike


@contextmanager
def started(made: Any, world_size: int, policy: Any, **given: Any) -> Iterator[TrainLab]:
    """Engines of two ranks, in the same two processes for all tests, or of one in this process."""
    RANKS.path = f"{made.__module__}:{made.__qualname__}"
    lab = TrainLab(RANKS if world_size == 2 else made, policy, {"algorithm": GRPO(), **given})
    try:
        yield lab
    finally:
        lab.close()
        lab.end()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whose output layer is its embedding, with parameters that two ranks cut amid a row."""
    from asyncflow_torch.reference import HuggingFacePolicy, tiny_model

    folder = tmp_path_factory.mktemp("tied")
    return HuggingFacePolicy(
        tiny_model(folder, tie_word_embeddings=True, hidden_size=32, intermediate_size=36, vocab_size=43)
    )


# With a critic the same is asked of stages 0, 2 and 3.
@pytest.mark.parametrize(("stage", "chunks"), [(0, False), (1, False), (3, True)])
def test_steps_are_those_of_the_plain_engine(policy: Any, stage: int, chunks: bool) -> None:
    """To 1e-5 in loss and norm, and to 1e-3 of how far they go: sums are in another order."""
    from asyncflow_torch.train import TorchEngine

    given: dict[str, Any] = {"algorithm": GRPO(entropy=0.01), "temperature": 0.7} if chunks else {"algorithm": GRPO()}
    plain = TrainLab(TorchEngine, policy, {"threads": 1, "learning_rate": 1e-3, "max_grad_norm": 0.1} | given)
    batches = [plain.batch((4, 3, 2), seed=number) for number in range(3)]
    plain.start()
    wanted = [plain.step(batch).metrics for batch in batches]
    weights = plain.tensors()

    make, of = (
        (chunked, {"of": "deepspeed", "gradient_checkpointing": True}) if chunks else (deepspeed_parts.engine_of, {})
    )
    with started(make, 2, policy, **options(stage, max_grad_norm=0.1, micro_batch_tokens=64), **given, **of) as lab:
        lab.start()
        have = [lab.step(batch).metrics for batch in batches]
        apart = distance(lab.tensors(), weights) / lab.moved(weights)

    for got, want in zip(have, wanted, strict=True):
        assert got.keys() == want.keys()
        assert {name: got[name] for name in want} == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert apart < 1e-3


def test_rows_are_packed_only_if_the_model_keeps_them_apart(tmp_path: Path) -> None:
    from asyncflow_torch.families import family
    from asyncflow_torch.reference import HuggingFacePolicy

    apart, mixed = (HuggingFacePolicy(family(name, tmp_path / name)) for name in ("qwen3_moe", "qwen3_5_text"))
    found = []
    for given in ({"micro_batch_tokens": 1}, {"packed": True}):
        with started(deepspeed_parts.engine_of, 1, apart, **options(3, **given)) as lab:
            lab.start()
            found.append(lab.engine.logprobs(lab.batch((4, 3, 2))).values)

    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    with started(deepspeed_parts.engine_of, 1, mixed, **options(3, packed=True)) as lab:
        with pytest.raises(AsyncFlowError, match="gives wrong log-probs: the tokens of a row change"):
            lab.start()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_policy_and_its_critic_make_the_plain_engines_steps(policy: Any, stage: int, tmp_path: Path) -> None:
    """Advantages are of mean 0 and spread 1 over both ranks' tokens; the critic goes on where it was, here and in the plain engine;
    and neither makes a step where the gradient of one is not finite."""
    from safetensors.numpy import load_file

    from asyncflow_torch.train import TorchEngine

    def weights(lab: TrainLab, path: Path) -> Any:
        lab.engine.save(path)
        critic = load_file(path / "critic" / "weights.safetensors")
        return lab.tensors() | {f"critic/{name}": array for name, array in critic.items()}

    given = {
        "algorithm": PPO(critic=Critic(decay=0.9)),
        "critic_learning_rate": 3e-3,
        "max_grad_norm": 0.5,
        "micro_batch_tokens": 64,
    }
    plain = TrainLab(TorchEngine, policy, {"threads": 1, "learning_rate": 1e-3, **given})
    batches = [plain.batch((4, 3, 2), seed=number) for number in range(4)]
    plain.start()
    before = weights(plain, tmp_path / "before")
    wanted = [plain.step(batch).metrics for batch in batches[:3]]
    after = weights(plain, tmp_path / "after")

    with started(deepspeed_parts.engine_of, 2, policy, **options(stage, **given)) as lab:
        lab.start()
        begins = lab.tensors()
        have = [lab.step(batch).metrics for batch in batches[:3]]
        found = weights(lab, tmp_path / "have")
        goes_on = lab.step(batches[3]).metrics
        lab.start(seed=5)
        lab.used.load(tmp_path / "have")
        assert lab.step(batches[3]).metrics == goes_on
        for which, says in (("policy", r"\bgrad_norm is (inf|nan)"), ("critic", "critic_grad_norm is (inf|nan)")):
            lab.start(algorithm=FaultyPPO(critic=Critic(decay=0.9), infinite=which), micro_batch_tokens=None)
            with pytest.raises(EngineError, match=f"{says}.*no step was made"):
                lab.step(batches[0])
            assert not unlike(lab.tensors(), begins)
            assert lab.step(batches[0]).metrics == pytest.approx(have[0], rel=1e-4, abs=1e-5), "of the critic, too"

    assert any(name.startswith("critic/") and (before[name] != array).any() for name, array in after.items())
    for got, want in zip(have, wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert distance(found, after) / distance(after, before) < 1e-3
    plain.used.load(tmp_path / "have")
    assert plain.step(batches[3]).metrics == pytest.approx(goes_on, rel=1e-4, abs=1e-5)


def test_of_several_updates_one_whose_gradient_is_not_finite_is_left_out(policy: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    with started(deepspeed_parts.engine_of, 2, policy, **options(2, updates=3, algorithm=Faulty(calls=(1,)))) as lab:
        lab.start()
        metrics = lab.step(lab.batch((4, 3, 4))).metrics
        lab.engine.save(tmp_path)

    steps = {float(step) for name, step in load_file(tmp_path / "optimizer.safetensors").items() if "step/" in name}
    assert (metrics["updates_skipped"], steps) == (1.0, {2.0})
    assert np.isfinite(list(metrics.values())).all()


def test_giving_saving_and_exporting_weights_takes_a_bucket_and_asks_no_rank_for_its_part(
    policy: Any, tmp_path: Path
) -> None:
    bucket = 256
    given = options(3, of="deepspeed", dtype="bfloat16", bucket_bytes=bucket)
    with started(counting, 2, policy, **given) as lab:
        lab.start()
        lab.engine.export(tmp_path)

    sizes = [array.size for array in policy.tensors(0).values()]
    check_giving(tmp_path, sum(sizes), max(sizes), bucket)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_engine_gives_the_same_logprobs_and_trains_nothing(policy: Any, stage: int) -> None:
    with started(deepspeed_parts.engine_of, 2, policy, **options(stage, dtype="bfloat16")) as lab:
        lab.start()
        batch = lab.batch((4, 3))
        wanted = lab.engine.logprobs(batch)
        lab.start(frozen=True)
        found = lab.engine.logprobs(batch)
        with pytest.raises(EngineError, match="frozen=True computes only log-probs"):
            lab.step(batch)

    assert found.values.tolist() == wanted.values.tolist()


def test_another_number_of_ranks_another_stage_and_the_plain_engine_go_on(policy: Any, tmp_path: Path) -> None:
    from asyncflow_torch.train import TorchEngine

    rising = {"lr_scheduler_type": "linear", "warmup_steps": 3, "max_steps": 12}
    with started(deepspeed_parts.engine_of, 2, policy, **options(3, **rising)) as lab:
        batches = [lab.batch((4, 3), seed=number) for number in range(4)]
        lab.start()
        lab.engine.save(tmp_path / "untrained")
        for batch in batches[:2]:
            lab.step(batch)
        lab.engine.save(tmp_path)
        saved = lab.tensors()
        rates = [lab.step(batch).metrics["learning_rate"] for batch in batches[2:]]
        wanted = lab.tensors()

        lab.start()
        lab.used.load(tmp_path)
        assert not unlike(lab.tensors(), saved)
        for batch in batches[2:]:
            lab.step(batch)
        assert not unlike(lab.tensors(), wanted), "resumed on as many ranks, it is the same to the bit"
        lab.used.load(tmp_path / "untrained")
        for batch in batches:
            lab.step(batch)
        assert not unlike(lab.tensors(), wanted), "what has no moments yet is gone on from without those of before"

    for made, size, given in (
        (deepspeed_parts.engine_of, 1, options(2, **rising)),
        (deepspeed_parts.engine_of, 2, options(0, **rising)),
        (TorchEngine, 1, {"threads": 1, "learning_rate": 1e-3, **rising}),
    ):
        with started(made, size, policy, **given) as other:
            other.start()
            other.used.load(tmp_path)
            assert not unlike(other.tensors(), saved)
            assert [other.step(batch).metrics["learning_rate"] for batch in batches[2:]] == rates
            other.expect_same(wanted, other.tensors(), f"{size} ranks")


def test_after_a_step_that_broke_off_none_is_made(policy: Any) -> None:
    with started(
        deepspeed_parts.engine_of,
        1,
        policy,
        **options(2, micro_batch_tokens=64, algorithm=Faulty(calls=(2,), raises=True)),
    ) as lab:
        batch = lab.batch((4, 3))
        lab.start()
        with pytest.raises((AsyncFlowError, KeyError), match="told to fail"):
            lab.step(batch)
        assert not unlike(lab.tensors(), policy.tensors(0))
        with pytest.raises(EngineError, match="a step broke off"):
            lab.step(batch)


# With a critic the same is asked of stages 0, 2 and 3.
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "bfloat16")])
def test_no_step_is_made_with_a_gradient_that_is_not_finite(policy: Any, stage: int, dtype: str) -> None:
    given = options(stage, dtype=dtype, weight_decay=0.1)
    with started(deepspeed_parts.engine_of, 2, policy, **given) as lab:
        batch = lab.batch((4, 3))
        lab.start()
        before = lab.tensors()
        lab.step(batch)
        wanted = lab.tensors()

    with started(deepspeed_parts.engine_of, 2, policy, **given, algorithm=Faulty(calls=(1,))) as lab:
        lab.start()
        with pytest.raises(EngineError, match="no step was made"):
            lab.step(batch)
        assert not unlike(lab.tensors(), before)
        lab.step(batch)
        assert not unlike(lab.tensors(), wanted)


def test_a_folder_in_bfloat16_is_trained_in_it_and_exported_in_it(policy: Any, tmp_path: Path) -> None:
    half = policy.rounded("bfloat16")
    with started(deepspeed_parts.engine_of, 2, half, **options(3)) as lab:
        lab.start()
        lab.step(lab.batch((4, 3)))
        lab.engine.export(tmp_path)
        tensors = lab.tensors()

    assert {str(array.dtype) for array in tensors.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert not unlike(half.read(tmp_path), tensors)
    assert all(np.isfinite(array.astype(np.float32)).all() for array in tensors.values())


SIZES, SPLIT = (4, 3, 2, 4, 4), [[1], [0, 2], [4], [3]]
"""Groups of a step, and of each part: of two ranks one has no rows of some."""
REWARDS = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.1, 0.3, 0.4, 0.1]


def rows_of(lab: TrainLab) -> Any:
    """With groups numbered from 0; those of group 1 have equal rewards."""
    batch = lab.batch(SIZES, rewards=REWARDS)
    return type(batch)(batch.ids, np.repeat(np.arange(5), SIZES), batch.columns)


ON_TWO_RANKS, IN_BFLOAT16 = (2, "float32", GRPO(entropy=0.1), 1e-5), (2, "bfloat16", GRPO(), 3e-2)
ALONE = (1, "float32", GSPO(clip_low=0.1), 1e-5)
WITH_CRITIC = (2, "float32", PPO(normalize_std=False, critic=Critic(decay=0.9)), 1e-5)


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "algorithm", "near"),
    [
        (0, *ON_TWO_RANKS), (1, *ON_TWO_RANKS), (3, *ON_TWO_RANKS),
        (0, *IN_BFLOAT16), (1, *IN_BFLOAT16), (2, *IN_BFLOAT16), (3, *IN_BFLOAT16),
        (1, *ALONE), (3, *ALONE),
        (2, *WITH_CRITIC), (3, *WITH_CRITIC),
    ],
)  # fmt: skip
def test_a_step_in_parts_is_the_whole_step_up_to_rounding_and_one_given_up_leaves_nothing(
    policy: Any, stage: int, ranks: int, dtype: str, algorithm: Any, near: float, tmp_path: Path
) -> None:
    """Clipped, by a norm of all ranks."""
    given = options(stage, dtype=dtype, algorithm=algorithm, max_grad_norm=0.1, micro_batch_tokens=64)
    with started(deepspeed_parts.engine_of, ranks, policy, **given) as lab:
        engine, batch = lab.start(), rows_of(lab)
        wanted = lab.step(batch)
        whole = state(engine, tmp_path / "whole")

        engine = lab.start()
        before = lab.tensors()
        engine.begin_step(0)
        engine.accumulate(groups_of(batch, SPLIT[1]))
        engine.abort_step()
        assert not unlike(lab.tensors(), before)
        found = in_parts(engine, batch, SPLIT)
        parts = state(engine, tmp_path / "parts")
        again = in_parts(engine, batch, SPLIT).metrics
        engine = lab.start()
        in_parts(engine, batch, SPLIT)
        assert in_parts(engine, batch, SPLIT).metrics == again, "the loss scale is 1 again"

    assert wanted.metrics["grad_norm"] > 0.1
    assert apart(gradients(parts), gradients(whole)) < near
    assert apart(weights(parts), weights(whole)) < near
    assert found.metrics == pytest.approx(wanted.metrics, rel=near, abs=1e-4 if dtype == "bfloat16" else 1e-6)
    assert (found.filtered is None) == (wanted.filtered is None)
    if found.filtered is not None:
        assert found.filtered.tolist() == [True] * 3 + [False] * 14


def test_a_metric_of_ones_own_is_divided_over_both_ranks_and_all_parts(policy: Any) -> None:
    with started(deepspeed_parts.engine_of, 2, policy, **options(2, algorithm=OfGroups())) as lab:
        lab.start()
        batch = rows_of(lab)
        wanted = lab.step(batch).metrics
        found = in_parts(lab.start(), batch, SPLIT).metrics

    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert (wanted["rows"], wanted["rows_used"]) == (17, 17)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_after_a_part_whose_loss_raised_the_next_step_is_right(policy: Any, stage: int) -> None:
    algorithm = Faulty(calls=(2,), raises=True)
    with started(deepspeed_parts.engine_of, 1, policy, **options(stage, algorithm=algorithm)) as lab:
        engine, batch = lab.start(algorithm=GRPO()), rows_of(lab)
        wanted = in_parts(engine, batch, SPLIT).metrics
        after = lab.tensors()

        engine = lab.start()
        before = lab.tensors()
        with pytest.raises(KeyError, match="told to fail"):
            in_parts(engine, batch, SPLIT)
        assert not unlike(lab.tensors(), before)
        assert in_parts(engine, batch, SPLIT).metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert distance(lab.tensors(), after) <= 1e-4 * lab.moved(after)
