"""Staleness by where it came from, and histograms of lengths, against naive counts."""

import numpy as np
import pytest

from asyncflow_sdk.types import Ragged, token_ages, token_staleness
from asyncflow_sdk.types.reports import length_bins
from asyncflow_sdk.workflow.loops.statistics import LengthHistogram, bin_start

pytestmark = pytest.mark.fast

SPANS = Ragged.of([np.array([[2, 0, 3], [4, 3, 5]]), np.array([[5, 0, 2]])], np.int64)


def test_ages_in_flight_and_in_queue_add_up_to_the_staleness_of_every_token() -> None:
    # the first row was drawn by versions 2 and 4 and completed at 5; the second drawn by 5 and completed at 6; 7 is trained
    ages = token_ages(SPANS, 7, np.array([5, 6]))

    assert ages.in_flight.tolist() == [3, 3, 3, 1, 1, 1, 1]
    assert ages.in_queue.tolist() == [2, 2, 2, 2, 2, 1, 1]
    assert (ages.total == token_staleness(SPANS, 7)).all()
    assert ages.metrics()["staleness_in_flight_mean"] == pytest.approx(13 / 7)
    assert ages.metrics()["staleness_in_queue_max"] == 2


@pytest.mark.parametrize("completed_at", [None, np.array([-1, -1])])
def test_what_nobody_saw_completed_aged_in_the_queue(completed_at: np.ndarray | None) -> None:
    ages = token_ages(SPANS, 7, completed_at)

    assert not ages.in_flight.any()
    assert (ages.total == token_staleness(SPANS, 7)).all()


def histogram(values: np.ndarray) -> LengthHistogram:
    lengths = LengthHistogram()
    for part in np.array_split(values, 7):
        lengths.add(length_bins(part), int(part.sum()), int((part**2).sum()))
    return lengths


def test_a_histogram_has_the_mean_and_deviation_exactly_and_quantiles_to_a_bin() -> None:
    values = np.random.default_rng(0).lognormal(4, 1.5, 5000).astype(np.int64)
    lengths = histogram(values)

    assert lengths.rows == 5000
    assert lengths.mean == pytest.approx(values.mean())
    assert lengths.deviation == pytest.approx(values.std(ddof=1))
    for share in (0.1, 0.5, 0.9, 0.99):
        assert lengths.quantile(share) == pytest.approx(np.quantile(values, share, method="inverted_cdf"), rel=0.06)


def test_every_length_is_in_the_bin_that_says_so() -> None:
    for length in [0, *range(1, 70), 1023, 1024, 1025, 1 << 20]:
        ((number, count),) = length_bins(np.array([length])).items()
        assert count == 1
        assert bin_start(number) <= max(length, 1) + 1e-6
        assert max(length, 1) < bin_start(number + 1) + 1e-6


def test_what_was_cut_short_is_counted_as_what_lasted_longer() -> None:
    random = np.random.default_rng(1)
    whole = random.lognormal(4, 1, 20000).astype(np.int64) + 1
    cut_at = random.integers(1, 400, 20000)
    cut = cut_at < whole
    finished, unfinished = histogram(whole[~cut]), histogram(cut_at[cut])

    estimate = finished.with_unfinished(unfinished)

    assert estimate.rows == pytest.approx(20000)
    assert finished.mean < 0.7 * whole.mean()  # what one sees of those that were finished
    assert estimate.quantile(0.5) == pytest.approx(np.quantile(whole, 0.5), rel=0.1)
    assert estimate.quantile(0.9) == pytest.approx(np.quantile(whole, 0.9), rel=0.1)
    assert finished.with_unfinished(LengthHistogram()) is finished


def test_without_anything_longer_the_tokens_that_were_there_count() -> None:
    estimate = histogram(np.array([3, 3, 4])).with_unfinished(histogram(np.array([9, 9])))

    assert estimate.bins == {
        bin_: pytest.approx(n)
        for bin_, n in {**length_bins(np.array([3, 3, 4])), **length_bins(np.array([9, 9]))}.items()
    }
