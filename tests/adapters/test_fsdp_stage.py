"""A reference in shards of FSDP2, as a stage of two ranks: the numbers of one process, also after one rank was killed in a collective."""

from __future__ import annotations

from pathlib import Path

from rank_runs import run_with_a_sharded_reference


def test_a_reference_in_shards_gives_one_processs_numbers_though_a_rank_is_killed(tiny: str, tmp_path: Path) -> None:
    run_with_a_sharded_reference("fsdp", tiny, tmp_path)
