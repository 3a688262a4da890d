"""Drawing: the numbers, what they choose, and the log-probs reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncflow_torch.sampling import draw, row_keys, uniforms

ROWS = 20000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])


def _splitmix64(key: int, count: int) -> int:
    """Steele, Lea and Flood's generator in Python's integers."""
    mask = (1 << 64) - 1
    x = (key + (count + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_numbers_are_splitmix64() -> None:
    keys = row_keys(12, 5)
    for count in (0, 1, 977):
        got = uniforms(torch.from_numpy(keys), torch.full((5,), count))
        wanted = [(_splitmix64(int(key) & (1 << 64) - 1, count) >> 40) / 2**24 for key in keys]
        assert got.tolist() == wanted


def test_a_seed_gives_its_rows_the_same_keys_and_none_gives_others() -> None:
    assert (row_keys(5, 3) == row_keys(5, 8)[:3]).all()
    assert len({*row_keys(5, 8).tolist(), *row_keys(-5, 8).tolist(), *row_keys(None, 8).tolist()}) == 24


def _draws(temperature: float, **cut: float) -> tuple[np.ndarray, np.ndarray]:
    uniform = uniforms(torch.from_numpy(row_keys(0, ROWS)), torch.zeros(ROWS, dtype=torch.int64))
    options = {}
    if cut:
        options["top_k"] = torch.full((ROWS,), int(cut.get("top_k", 0)))
        options["top_p"] = torch.full((ROWS,), float(cut.get("top_p", 1.0)))
    token, logprob = draw(LOGITS.expand(ROWS, -1), torch.full((ROWS,), temperature), uniform, **options)
    return token.numpy(), logprob.numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 1e-6}, [0]),
        ({"top_p": 0.99999, "top_k": 3}, [0, 1, 2]),
    ],
)
def test_tokens_come_with_the_frequencies_of_the_distribution(
    temperature: float, cut: dict[str, float], kept: list[int]
) -> None:
    # when
    token, logprob = _draws(temperature, **cut)

    # then frequencies fit (six standard deviations), nothing that was cut is drawn
    wanted = torch.softmax(LOGITS / temperature, 0).numpy()
    full = np.log(wanted)
    wanted = np.where(np.isin(np.arange(6), kept), wanted, 0)
    wanted /= wanted.sum()
    counts = np.bincount(token, minlength=6)
    assert (np.abs(counts / ROWS - wanted) <= 6 * np.sqrt(wanted * (1 - wanted) / ROWS) + 1e-9).all()
    assert set(token) <= set(kept)

    # and the log-prob is under the whole vocabulary, whatever was cut
    np.testing.assert_allclose(logprob, full[token], atol=1e-5)


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    # given probabilities .5 .3 .2
    logits = torch.tensor([0.3, 0.5, 0.2]).log().expand(ROWS, -1)
    uniform = torch.linspace(0, 1 - 1e-6, ROWS)
    off = torch.zeros(ROWS, dtype=torch.int64)

    # when / then: .5 alone holds .4; .5 and .3 hold .7
    for top_p, kept in ((0.4, {1}), (0.7, {0, 1}), (0.95, {0, 1, 2})):
        token, _ = draw(logits, torch.ones(ROWS), uniform, top_k=off, top_p=torch.full((ROWS,), top_p))
        assert set(token.tolist()) == kept


def test_a_row_that_cuts_nothing_draws_alike_beside_rows_that_do() -> None:
    # given a tail of tokens too unlikely for rounding to tell, and numbers that fall into it
    logits = torch.cat([torch.zeros(1), torch.full((1000,), -22.0)]).expand(50, -1)
    uniform = 1 - torch.arange(1, 51) * 2.0**-24
    plain, _ = draw(logits, torch.ones(50), uniform)
    assert (plain > 0).any()

    # when
    off = {"top_k": torch.zeros(50, dtype=torch.int64), "top_p": torch.ones(50)}
    beside, _ = draw(logits, torch.ones(50), uniform, **off)

    # then
    assert beside.tolist() == plain.tolist()


def test_greedy_rows_take_the_likeliest_token_and_others_are_not_disturbed() -> None:
    # given a greedy row among sampled ones
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(4, -1)
    uniform = torch.tensor([0.999, 0.999, 0.0, 0.5])
    alone, _ = draw(logits, torch.ones(4), uniform)

    # when
    token, logprob = draw(logits, torch.tensor([1.0, 0.0, 1.0, 1.0]), uniform)

    # then
    assert token[1] == 1
    assert logprob[1] == pytest.approx(torch.log_softmax(logits[0], 0)[1].item(), abs=1e-6)
    assert token[[0, 2, 3]].tolist() == alone[[0, 2, 3]].tolist()
    assert token[0] == 2


def test_the_largest_number_draws_no_token_of_probability_zero() -> None:
    logits = torch.tensor([[0.0, 0.1, float("-inf")]]).expand(1000, -1) + torch.rand(1000, 1)
    token, _ = draw(logits, torch.ones(1000), torch.full((1000,), 1 - 2.0**-24))
    assert token.max() == 1
