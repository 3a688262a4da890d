"""Checks of stop texts, and of draws by top_p, top_k, min_p and a repetition penalty."""

from __future__ import annotations

import itertools

import numpy as np

from ..chance import FALSE_ALARM, chance
from ..check import DoesNotApply, check, expect
from .basic import telling_prompt
from .lab import RolloutLab, first_tokens

DRAWS, PROMPTS, WHOLE = 320, 8, 16
NEVER = "\x00 never drawn"
VALUES = {"top_k": 3, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 1000.0}


@check(
    "rollout", "full",
    impact="a response is cut before its end, or goes on after it: text that was not meant is scored and trained",
    hint="abort a response once request.watch().found(all its tokens so far); keep the token that completes the text",
    after=("greedy", "logprobs", "stops"),
)  # fmt: skip
async def stop_texts(lab: RolloutLab) -> None:
    """A response with stop texts reaches the token that completes one, also its first token, and
    ends there or soon after."""
    can = lab.engine.capabilities
    if not can.stop_texts:
        raise DoesNotApply("it declares no stop_texts: the worker cuts its responses")
    early, late, most = set[str](), dict[str, str](), WHOLE
    for prompt in lab.policy.prompts(PROMPTS, seed=12):
        limit, whole = most, lab.policy.greedy(lab.version, prompt, most)
        texts = [lab.policy.text(whole[:count]) for count in range(len(whole) + 1)]
        if None in texts:
            raise DoesNotApply("this policy has no text")
        before, after = (str(texts[min(count, len(whole))]) for count in (4, 5))
        if not before or len(after) == len(before) or not after.startswith(before):
            continue
        stop = after[len(before) - 1 : len(before) + 1]  # of two tokens
        kinds = {"": (0, stop), ", drawn as its first token": (0, str(texts[1]))}
        if "partial" in can.swap:
            kinds[", begun before it was interrupted"] = (4, stop)
        for kind, (had, stop) in kinds.items():
            if not stop or stop in str(texts[had]):
                continue
            counts = [str(text).count(stop) for text in texts]
            end = next(count for count, times in enumerate(counts) if times) - had
            again = next((count for count, times in enumerate(counts) if times > 1), len(whole)) - had
            so_far = np.concatenate([prompt, whole[:had]])
            asked = lab.request(so_far, max_tokens=limit - had, stop=(NEVER, stop), drawn=had)
            (got,) = await lab.answer(asked)
            tokens = len(got.token_ids)
            lab.check_response(so_far, got, whole[had:][:tokens], when=f" with stop={stop!r}")
            expect(
                tokens >= end,
                f"a response ends after {tokens} tokens, before its stop text {stop!r}{kind}, which {end} complete",
            )
            if tokens < again:
                early.add(kind)
                expect(
                    got.finish_reason == "stop",
                    f"a response that ends at {stop!r} says it ended for {got.finish_reason!r}",
                )
            elif end < again - 1 and kind not in early:  # the abort may have come after the last token: ask for more
                late[kind], most = stop, min(2 * limit, max(lab.context - 32, WHOLE))
    for kind in late.keys() - early:
        expect(False, f"each response goes on over its stop text{kind}, as {late[kind]!r}")
    if not early:
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
    prompt, logprobs = telling_prompt(lab)
    share = np.exp(logprobs)
    groups = await lab.draw(prompt, DRAWS, temperature=1.0, seed=2000, **{name: value})
    for got in itertools.chain(*groups):
        lab.check_logprobs(prompt, got, when=f" with {name}={value:g}")
    drawn = first_tokens(groups).ravel()
    said = f"of {len(drawn)} tokens drawn with {name}={value:g}"
    if name == "repetition_penalty":
        read = np.isin(np.arange(len(share)), prompt)
        part = float(read[drawn].mean())
        expect(
            part < share[read].sum() and chance(read, share, part, len(drawn)) < FALSE_ALARM,
            f"{said} {part:.1%} are tokens of the prompt, and without it {share[read].sum():.1%} would be",
        )
        (got,) = await lab.answer(
            lab.request(lab.policy.prompts(1, seed=13)[0], max_tokens=WHOLE, repetition_penalty=value)
        )
        ids = np.asarray(got.token_ids).tolist()
        expect(len({*ids}) == len(ids), f"tokens with {name}={value:g} come twice: {ids}; drawn ones count, too")
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
    outside = sorted({token for token in drawn.tolist() if share[token] < most})
    expect(not outside, f"{said} some are not allowed: {outside}; allowed are {np.flatnonzero(allowed).tolist()}")
    mean = float(logprobs[drawn].mean())
    by_chance = chance(logprobs, allowed / allowed.sum(), mean, len(drawn))
    expect(by_chance > FALSE_ALARM, f"{said} the mean log-prob is {mean:.4f}: the draw is cut more than asked for")
