"""The parts of the adapter for DeepSpeed that need no DeepSpeed: its configuration, and runs of elements as rectangles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncflow_deepspeed.boxes import boxes
from asyncflow_deepspeed.config import make_config
from asyncflow_sdk.errors import ConfigError

pytestmark = pytest.mark.fast


def configured(given: Any = None, **options: Any) -> Any:
    usual = {"stage": 3, "dtype": "bfloat16", "max_grad_norm": 1.0, "offload_optimizer": False}
    return make_config(given=given, **usual | options)


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (1, 4), (3, 1, 4), (2, 3, 4, 2)])
def test_boxes_cover_a_run_once_and_nothing_else(shape: tuple[int, ...]) -> None:
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start in range(whole.size):
        for count in range(1, whole.size - start + 1):
            found = list(boxes(start, count, shape))

            for offset, begins, sizes in found:
                part = whole[tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))]
                assert part.shape == sizes
                assert part.ravel().tolist() == list(range(start + offset, start + offset + part.size))
            assert sum(int(np.prod(sizes)) for _, _, sizes in found) == count
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_what_a_user_adds_goes_beside_what_the_engine_says() -> None:
    given = {
        "zero_optimization": {"stage": "auto", "stage3_prefetch_bucket_size": 1000, "offload_optimizer": {"pin_memory": True}},
        "train_batch_size": "auto", "fp16": {"enabled": False}, "communication_data_type": "bf16",
    }  # fmt: skip

    config = configured(given, offload_optimizer=True)

    assert config["zero_optimization"] == {
        "stage": 3, "stage3_prefetch_bucket_size": 1000, "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    assert config["communication_data_type"] == "bf16"
    assert config["bf16"] == {"enabled": True}
    assert not {"train_batch_size", "fp16"} & config.keys()
    assert "auto" not in str(config)


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ({"zero_optimization": {"stage": 2}}, {}, r"zero_optimization.stage=2, and the engine's options say 3"),
        ({"bf16": {"enabled": True}}, {"dtype": "float32"}, r"bf16.enabled=True, and the engine's options say False"),
        ({"gradient_clipping": 0.5}, {}, r"gradient_clipping=0.5, and the engine's options say 1.0"),
        ({"optimizer": {"type": "Adam"}}, {}, "optimizer=.*give it lr, betas and weight_decay"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "scheduler=.*warmup_steps"),
        ({"train_batch_size": 8}, {}, "train_batch_size=8; the run says"),
        ({"gradient_accumulation_steps": 4}, {}, "gradient_accumulation_steps=4; .*micro_batch_tokens"),
        ({"fp16": {"enabled": True}}, {}, "fp16=.*loss scaling"),
        ({"zero_optimization": {"mics_shard_size": 2}}, {}, "zero_optimization.mics_shard_size=2"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {}, "nvme"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {}, "offload"),
        ({"zero_optimization": 3}, {}, "no mapping"),
        ({}, {"stage": 4}, "stage must be one of 0, 1, 2, 3, not 4"),
        ({}, {"stage": 0, "offload_optimizer": True}, "stage 0"),
        ({}, {"dtype": "float16"}, "float16"),
    ],
)
def test_what_contradicts_is_refused_by_name(given: Any, options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configured(given, **options)
