"""Checks of stop texts, and of draws by top_p, top_k, min_p and a repetition penalty."""

from __future__ import annotations

import numpy as np

from ..chance import FALSE_ALARM, chance
from ..check import DoesNotApply, check, expect
from .lab import RolloutLab

DRAWS, PROMPTS, WHOLE = 320, 16, 16
VALUES = {"top_k": 3, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 1000.0}


@check(
    "rollout", "full",
    impact="a response is cut before its end, or goes on after it: text that was not meant is scored and trained",
    hint="abort a response once request.watch().found(all its tokens so far); keep the token that completes the text",
    after=("greedy", "logprobs", "stops"),
)  # fmt: skip
async def stop_texts(lab: RolloutLab) -> None:
    """A response with stop texts reaches the token that completes one, and ends there or soon
    after."""
    if not lab.engine.capabilities.stop_texts:
        raise DoesNotApply("it declares no stop_texts: the worker cuts its responses")
    found, early, late, most = 0, False, "", WHOLE
    for prompt in lab.policy.prompts(PROMPTS, seed=12):
        whole = lab.policy.greedy(lab.version, prompt, most)
        texts = [lab.policy.text(whole[:count]) for count in range(len(whole) + 1)]
        if None in texts:
            raise DoesNotApply("this policy has no text")
        before, after = (str(texts[min(count, len(whole))]) for count in (4, 5))
        if not before or len(after) == len(before) or not after.startswith(before):
            continue
        stop = after[len(before) - 1 : len(before) + 1]  # of two tokens
        end = next(count for count, text in enumerate(texts) if stop in str(text))
        (got,) = await lab.answer(lab.request(prompt, max_tokens=most, stop=(stop,)))
        tokens = len(got.token_ids)
        lab.check_response(prompt, got, whole[:tokens], when=f" with stop={stop!r}")
        expect(
            tokens >= end,
            f"a response ends after {tokens} tokens, before its stop text {stop!r}, which {end} complete",
        )
        if tokens < len(whole):
            early = True
            expect(
                got.finish_reason == "stop",
                f"a response that ends at {stop!r} says it ended for {got.finish_reason!r}",
            )
        elif end < len(whole) - 1 and not early:  # the abort may have come after the last token: ask for more of them
            late, most = stop, min(2 * most, max(lab.context - 32, WHOLE))
        found += 1
    expect(early or not late, f"each response goes on to its end, over its stop text, as {late!r}")
    if not found:
        raise DoesNotApply(f"no response to {PROMPTS} prompts has a text over two tokens")


@check(
    "rollout", "full",
    impact="log-probs are of a restricted distribution, which training does not compute: every ratio is wrong",
    hint="capabilities.restrictions: leave out those whose draws have other log-probs in this engine",
    after=("logprobs", "draws"),
)  # fmt: skip
async def restricted(lab: RolloutLab) -> str:
    """Draws keep to each declared restriction, and log-probs stay those of the whole vocabulary."""
    able = sorted(lab.engine.capabilities.restrictions)
    expect(set(able) <= VALUES.keys(), f"capabilities.restrictions is {able}; known are {sorted(VALUES)}")
    for name in able:
        await _check_restriction(lab, name, VALUES[name])
    return f"{DRAWS} tokens each by {', '.join(able) or 'none'}"


async def _check_restriction(lab: RolloutLab, name: str, value: float) -> None:
    prompt, logprobs = _prompt(lab)
    share = np.exp(logprobs)
    drawn = []
    for seed in range(-(-DRAWS // lab.rows)):
        more = {name: value}
        request = lab.request(prompt, lab.rows, temperature=1.0, max_tokens=1, seed=2000 + seed, **more)
        for got in await lab.answer(request):
            lab.check_logprobs(prompt, got, when=f" with {name}={value:g}")
            drawn.append(int(np.asarray(got.token_ids)[0]))
    said = f"of {len(drawn)} tokens drawn with {name}={value:g}"
    if name == "repetition_penalty":
        read = np.isin(np.arange(len(share)), prompt)
        part = float(read[drawn].mean())
        expect(
            part < share[read].sum() and chance(read, share, part, len(drawn)) < FALSE_ALARM,
            f"{said} {part:.1%} are tokens of the prompt, and without it {share[read].sum():.1%} would be",
        )
        return
    order = np.argsort(-share, kind="stable")
    mass = share[order].cumsum() - share[order]
    kept = {
        "top_k": np.arange(len(share)) < value,
        "top_p": mass < value,
        "min_p": share[order] >= value * share.max(),
    }
    allowed = np.zeros(len(share))
    allowed[order] = share[order] * kept[name]
    most = share[np.flatnonzero(allowed)].min() - lab.tolerance  # a token as likely as the last one may replace it
    outside = sorted({token for token in drawn if share[token] < most})
    expect(not outside, f"{said} some are not allowed: {outside}; allowed are {np.flatnonzero(allowed).tolist()}")
    mean = float(logprobs[drawn].mean())
    by_chance = chance(logprobs, allowed / allowed.sum(), mean, len(drawn))
    expect(by_chance > FALSE_ALARM, f"{said} the mean log-prob is {mean:.4f}: the draw is cut more than asked for")


def _prompt(lab: RolloutLab) -> tuple[np.ndarray, np.ndarray]:
    """Return a prompt whose own tokens are about as likely as the others, and the log-probs after it."""
    prompts = lab.policy.prompts(PROMPTS, longest=min(96, lab.context // 2), seed=5)
    found = [(prompt, lab.policy.next_logprobs(lab.version, prompt)) for prompt in prompts]
    scored = [(prompt, row) for prompt, row in found if row is not None]
    if not scored:
        raise DoesNotApply("this policy's answers are not drawn")
    return min(scored, key=lambda each: abs(float(np.exp(each[1][np.unique(each[0])]).sum()) - 0.5))
