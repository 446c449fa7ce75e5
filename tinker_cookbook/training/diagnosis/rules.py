"""Conditions of causes, which take the history of a run and return since when they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean, median

import numpy as np

from tinker_cookbook.training.diagnosis.equal_rewards import learned, mostly_right, no_signal
from tinker_cookbook.training.diagnosis.history import (
    CUT,
    DUPLICATES,
    ENTROPY,
    FEW,
    KEPT,
    KL,
    LENGTH,
    LONG,
    MIXED,
    REPEATED,
    REWARD,
    STALE,
    STEPS,
    TEACHER,
    TEST_REWARD,
    TREND,
    Found,
    History,
    Series,
    mean_text,
    steps_text,
)


def in_steps(
    holds: Callable[[Mapping[str, float]], bool], text: str, steps: int = STEPS
) -> Callable[[History], Found]:
    """Returns the rule of a cause that the rows of a few steps show."""

    def rule(run: History) -> Found:
        found = run.streak(holds)
        return (found[0], text) if len(found) >= steps else None

    return rule


def stale(run: History) -> Found:
    """Samples are older than the weights, and the policies differ."""
    steps = run.streak(lambda row: row.get(STALE, 0.0) >= 1)
    kl = median(run(KL).values[-FEW:] or [0.0])
    # Losses of asynchronous runs correct for a policy that differs a little, so more is allowed.
    if len(steps) < STEPS or not kl > 5 * _HIGH_KL:
        return None
    age = mean_text(fmean(run(STALE).values[-STEPS:]), run(STALE).steps[-STEPS:])
    return steps[0], (
        f"Samples are {age} updates old when they are trained, and the KL of sampler "
        f"and trainer is {kl:.2g} (median of {steps_text(run(KL).steps[-FEW:])})"
    )


_HIGH_KL = 0.01
"""Nats per token; the bound in Tinker's documentation on RL."""


def high_kl(run: History) -> Found:
    """The policies of sampler and trainer differ although the weights are the same."""
    kl = run(KL)
    # The median, because a single token can make the KL of one step high.
    # Steps without training have no KL; the last ones that have count until then.
    if not len(kl) or not (now := median(kl.values[-STEPS:])) > _HIGH_KL:
        return None
    # One step is enough if it is ten times the bound.
    if (len(kl) < STEPS and now < 10 * _HIGH_KL) or run.last.get(STALE, 0) >= 1:
        return None
    since = kl.steps[-1]
    for step, value in zip(reversed(kl.steps), reversed(kl.values), strict=True):
        if not value > _HIGH_KL:
            break
        since = step
    highest = max(range(-len(kl.values[-STEPS:]), 0), key=kl.values.__getitem__)
    return (
        since,
        f"The KL of sampler and trainer is {kl.at(highest)}, above {_HIGH_KL} nats a token",
    )


def rate_too_high(run: History) -> Found:
    """The loss rises, or the reward falls while the entropy changes."""
    loss = run.loss
    if len(loss) and math.isnan(loss.values[-1]):
        return loss.steps[-1], "The loss is not a number"
    return _rising_loss(loss, run.held_out) or _rising_loss(run(TEACHER)) or _broken_policy(run)


def _rising_loss(loss: Series, held_out: Series | None = None) -> Found:
    if len(loss) < STEPS:
        return None
    # The median, because one batch may be garbage. The lowest of the first, because the loss may
    # rise at once. 30% are more than the noise of batches of eight examples, and a tenth of a nat
    # more than that of a loss near 0.
    first, now = min(loss.values[:STEPS]), median(loss.values[-STEPS:])
    high = [value for value in loss.values[-TREND:] if value > 3 * loss.values[0] + 0.1]
    # Batches may become harder; held-out data do not.
    worse = not held_out or held_out.values[-1] > held_out.values[0]
    # Two batches in a row at three times the first, before an evaluation or a median can tell.
    early = len(loss) < 2 * STEPS and min(loss.values[-2:]) > 3 * loss.values[0] + 0.1
    rose = len(loss) >= 2 * STEPS and now > first + max(0.3 * first, 0.1)
    if not (early or (worse and (rose or len(high) >= STEPS))):
        return None
    last = [0.0 if math.isnan(value) else value for value in loss.values[-LONG:]]
    peak = last.index(max(last)) - len(last)
    text = f"The loss rose from {loss.at(loss.values.index(first))} to {loss.at(peak)}"
    text += "" if peak == -1 else f", and is {loss.at(-1)}"
    return loss.first_step(lambda value: value > 1.3 * loss.values[0] + 0.1), text


def _broken_policy(run: History) -> Found:
    """A reward that falls, or is lost, while the entropy changes: the weights moved too far."""
    reward, entropy = run(REWARD), run(ENTROPY)
    if not len(reward) or not len(entropy) or run.last.get(TEACHER) is not None:
        return None
    if (found := _lost_at_once(run) or _swings(entropy)) is not None:
        return found
    if min(len(reward), len(entropy)) <= FEW:
        return None
    # Both means have this many values, and no step is in both.
    count = min(FEW, len(reward) // 2)
    steps, values = reward.steps[-LONG:], reward.values[-LONG:]
    means = np.convolve(values[:-count], np.full(count, 1 / count), "valid")
    at = int(np.argmax(means))
    best, now = float(means[at]), fmean(values[-count:])
    # A quarter: between batches the entropy of the same policy differs by a twentieth.
    moved = abs(math.log(max(entropy.end, 1e-9) / max(entropy.values[0], 1e-9))) > 0.25
    fell = best - now > max(0.3 * abs(best), 4 * reward.error)
    lost = (
        len(run.streak(no_signal)) >= FEW and max(run(MIXED).values[-LONG:]) > 0.1 and now <= best
    )
    lost = lost and now <= max(reward.values[:FEW]) and not learned(run)
    if not (moved and (fell or lost)):
        return None
    since = run.streak(no_signal)[0] if lost else steps[-1]
    if fell:
        later = zip(steps[at + count :], values[at + count :], strict=True)
        since = next((step for step, value in later if value <= (best + now) / 2), since)
    change = f"The reward fell from {mean_text(best, steps[at : at + count])} to"
    if not fell:
        change = "The rewards of each group are equal,"
    return since, (
        f"{change} {mean_text(now, steps[-count:])}, and the entropy changed from {entropy.at(0)} "
        f"to {entropy.end_text} nats"
    )


def _lost_at_once(run: History) -> Found:
    """Few updates made the answers random, and those of a group get the same reward since then."""
    reward, entropy, steps = run(REWARD), run(ENTROPY), run.streak(no_signal)
    if len(steps) < STEPS or not max(run(MIXED).values[-LONG:]) > 0.1 or mostly_right(run):
        return None
    if run.mean_of(REWARD) > reward.values[0] + 2 * reward.error:
        return None
    # Twice: training on a task makes the answers more certain, or leaves the entropy as it was.
    pairs = zip(entropy.steps, entropy.values, strict=True)
    high = [step for step, value in pairs if value > 2 * entropy.values[0]]
    # A rise long before the last rewards that differed is another matter.
    if not high or high[-1] < steps[0] - FEW:
        return None
    at = entropy.steps.index(high[0])
    return high[0], (
        f"The entropy rose from {entropy.at(0)} to {entropy.at(at)}, and since step {steps[0]} "
        "all samples of a group get the same reward"
    )


def _swings(entropy: Series) -> Found:
    """The entropy goes up and down: each update moves the weights too far."""
    steps, values = entropy.steps[-TREND:], entropy.values[-TREND:]
    # More than in the first batch, and more than the noise of an entropy near 0.
    least = max(entropy.values[0], 0.3)
    low = high = 0
    turns = list[int]()
    for i, value in enumerate(values):
        low = i if value < values[low] else low
        high = i if value > values[high] else high
        rises = len(turns) % 2 == 0
        if rises and value > max(2 * values[low], values[low] + least):
            turns.append(low)
            high = i
        elif not rises and value < min(values[high] / 2, values[high] - least):
            turns.append(high)
            low = i
    # Twice up and twice down. In hacked runs, whose entropy is high, it falls once.
    if len(turns) < 4:
        return None
    shown = ", ".join(entropy.at(i - len(values)) for i in [*turns, len(values) - 1])
    return steps[turns[0]], f"The entropy goes up and down: {shown} (nats)"


def entropy_collapse(run: History) -> Found:
    """The entropy falls, and the reward does not rise."""
    entropy, reward = run(ENTROPY), run(REWARD)
    if len(entropy) < 2 * FEW or not len(reward):
        return None
    # A policy that has learned its task is certain, too; then the reward has risen. The median,
    # because a rate that is too high may ruin a single step.
    risen = median(reward.values[-FEW:]) > reward.start + 2 * reward.error
    if entropy.end > 0.2 * entropy.start or risen:
        return None
    since = entropy.first_step(lambda value: value < 0.5 * entropy.start)
    return since, (
        f"The entropy fell from {entropy.start_text} to {entropy.end_text} nats, so that samples "
        "of a group are alike, although the reward has not risen"
    )


def reward_hacking(run: History) -> Found:
    """The reward rises, and the answers become others than those of a model that learns a task."""
    reward, entropy, length = run(REWARD), run(ENTROPY), run(LENGTH)
    if min(len(reward), len(entropy), len(length)) < STEPS + FEW:
        return None
    if reward.end <= reward.start + 2 * reward.error:
        return None
    repeated = run(REPEATED)
    # Answers that loop are not better ones, and often make the model more certain.
    if repeated.end >= 0.5 > 2 * repeated.start:
        return repeated.first_step(lambda value: value >= 0.25), (
            f"The reward rose from {reward.start_text} to {reward.end_text}, while answers began "
            f"to repeat themselves: {repeated.end:.0%} of their spans of four tokens occurred "
            f"before in the same answer, after {repeated.start:.0%} (means of the same steps). "
            "Perhaps the reward is high for something that you do not want"
        )
    # A model that learns a task becomes more certain, also if its answers become short or long.
    similar = length.end < 1.5 * length.start and length.start < 1.5 * length.end
    if not entropy.end > 1.75 * entropy.start or similar:
        return None
    since = entropy.first_step(lambda value: value > 1.3 * entropy.start)
    since = min(since, _length_changed(length))
    return since, (
        f"The reward rose from {reward.start_text} to {reward.end_text}, while the entropy rose "
        f"from {entropy.start:.3g} to {entropy.end:.3g} nats and the tokens of an answer went from "
        f"{length.start:.3g} to {length.end:.3g} (means of the same steps). Perhaps the reward "
        "is high for something that you do not want"
    )


def _length_changed(length: Series) -> int:
    # Values of the first steps differ from their own mean, too.
    later = Series(length.steps[STEPS:], length.values[STEPS:])
    return later.first_step(lambda value: not length.start / 1.3 < value < 1.3 * length.start)


def length_drift(run: History) -> Found:
    """The length of the answers changes, and they get no better."""
    length, cut, reward = run(LENGTH), run(CUT), run(REWARD)
    if len(length) < 2 * FEW or not len(reward):
        return None
    start, end = length.start, length.end
    # Longer answers may be better ones, unless most of them no longer end.
    full = end > 1.5 * start and cut.end >= 0.5 > 2 * cut.start
    idle = (end > 2 * start or end < start / 2) and reward.end <= reward.start + 2 * reward.error
    if not (full or idle):
        return None
    since = _length_changed(length)
    text = f"The number of tokens went from {length.start_text} to {length.end_text}, and "
    text += (
        f"{cut.end:.0%} of these last answers are cut off" if full else "the reward has not risen"
    )
    return since, text


def reward_part(run: History) -> Found:
    """One part of the reward differs much more than another."""
    ranges: dict[str, list[float]] = {}
    for _, parts in run.ranges:
        for name, value in parts.items():
            ranges.setdefault(name, []).append(value)
    # A part that was seldom found is no evidence.
    usual = {name: median(values) for name, values in ranges.items() if len(values) >= FEW}
    if len(usual) < 2:
        return None
    large, small = max(usual, key=usual.__getitem__), min(usual, key=usual.__getitem__)
    # A penalty of a tenth or a fiftieth is usual; less is not seen beside the noise of the other.
    if usual[large] < 50 * usual[small]:
        return None
    text = (
        f"{large} makes a difference of {usual[large]:.3g} to the rewards of a group, and {small} "
        f"of {usual[small]:.3g} (medians of {steps_text([step for step, _ in run.ranges])}), "
        "which has no effect beside it"
    )
    if usual[small] > 0:
        text += f"; multiply {large} by {usual[small] / usual[large]:.2g} to make them alike"
    return run.ranges[0][0], text


def held_out_falls(run: History) -> Found:
    """The reward rises, and that of held-out problems falls."""
    train, test = run(REWARD), run(TEST_REWARD)
    if len(test) < 4 or len(train) < 2 * FEW:
        return None
    best = max(range(len(test)), key=test.values.__getitem__)
    later = test.values[best + 1 :]
    # Two evaluations below the best by a fifth and by more than their noise. The median of the
    # steps between evaluations measures noise: it ignores a single fall.
    noise = 1.48 * median(abs(one) for one in np.diff(test.values))
    margin = max(0.2 * abs(test.values[best]), 2 * noise)
    if len(later) < 2 or max(later[-2:]) > test.values[best] - margin:
        return None
    if train.end <= train.start + 2 * train.error:
        return None
    return test.steps[best], (
        f"The reward rose to {train.end_text}, but on held-out problems it fell from "
        f"{test.at(best)} to {test.at(-1)}"
    )


def loss_spike(run: History) -> Found:
    """The loss of one batch is far above that of the others."""
    loss = run.loss
    if len(loss) < 10:
        return None
    # Two steps later it is known whether one batch or the weights caused it.
    *before, value, after, last = loss.values[-KEPT // 2 :]
    usual = median(before)
    # Six deviations of the median, 1.48 of which are a standard deviation of normal noise.
    noise = 1.48 * median(abs(one - usual) for one in before)
    # A batch that is worse than the first before any training is no hard batch of these data.
    if not value > max(usual + 6 * noise, 1.3 * usual, loss.values[0]):
        return None
    if max(after, last) > (usual + value) / 2:
        return None
    return loss.steps[-3], (
        f"The loss of one batch is {loss.at(-3)}, and was {usual:.3g} before (median of "
        f"{steps_text(loss.steps[-KEPT // 2 : -3])})"
    )


def rate_too_low(run: History) -> Found:
    """Neither the loss nor the policy moves."""
    return _flat_loss(run) or _flat_policy(run)


def _may_be_flat(run: History) -> bool:
    """Returns whether the run is so long that it should have moved; warm-up does not count."""
    steps = len(run.loss) or len(run(REWARD))
    last = run.last
    done = last.get("progress", last.get("progress/done_frac", 1.0))
    # A fifth of a run, because long ones have small rates.
    return steps >= TREND + run.config.get("warmup_steps", 0) and (done >= 0.2 or steps >= 100)


def _flat_loss(run: History) -> Found:
    loss, test = run.loss, run.held_out
    if not len(loss) or not _may_be_flat(run):
        return None
    # The same examples each time, so there is no noise of batches.
    if len(test) >= 3:
        change = test.values[0] - test.values[-1]
        flat = abs(change) < 0.01 * abs(test.values[0])
        moved = f"held-out loss went from {test.at(0)} to {test.at(-1)}"
    else:
        change = loss.start - loss.end
        # Flat only if the noise cannot hide an improvement of a twentieth.
        flat = abs(change) + 2 * loss.error < 0.05 * abs(loss.start)
        moved = f"loss went from {loss.start_text} to {loss.end_text}"
    if not flat:
        return None
    return loss.steps[0], f"In {len(loss)} steps the {moved}"


def _flat_policy(run: History) -> Found:
    reward, entropy, length = run(REWARD), run(ENTROPY), run(LENGTH)
    if not all(map(len, (reward, entropy, length, run(MIXED)))):
        return None
    trained = [row for row in run.rows if row.get("optim/num_steps")]
    if len(trained) < TREND or not _may_be_flat(run) or TEACHER in run.last:
        return None
    # Adam moves a weight by at most the rate in a step. After 0.01 in all an adapter has changed
    # the answers, so that the reward does not depend on them.
    if len(reward) * float(run.config.get("learning_rate") or 0) > 0.01:
        return None
    # Without different rewards the rate has no effect. The entropy moves before the reward does.
    if fmean(run(MIXED).values[-LONG:]) < 0.1 or abs(reward.end - reward.start) > 2 * reward.error:
        return None
    for series in (entropy, length):
        change = abs(series.end - series.start)
        if change + 2 * series.error > 0.15 * abs(series.start) or change > 0.05 * series.start:
            return None
    return reward.steps[0], (
        f"In {len(reward)} steps neither the reward moved, from {reward.start_text} to "
        f"{reward.end_text}, nor the entropy, from {entropy.start_text} to {entropy.end_text}, "
        "although rewards differ within groups"
    )


def overfitting(run: History) -> Found:
    """The held-out loss rises, and that of the training data falls."""
    loss, test = run.loss, run.held_out
    if len(test) < 3 or len(loss) < FEW:
        return None
    best = min(range(len(test)), key=test.values.__getitem__)
    later = test.values[best + 1 :]
    # Twice, and above the rounding and small swings of a schedule's end.
    if len(later) < 2 or min(later[-2:]) < 1.03 * test.values[best]:
        return None
    if loss.end > min(loss.values[:STEPS]):
        return None
    return test.steps[best], (
        f"The held-out loss rose from {test.at(best)} to {test.at(-1)}, while the loss of the "
        "training data fell"
    )


def chosen_falls(run: History) -> Found:
    """DPO makes the chosen answers less likely."""
    nll = run("test/nll")
    # A nat a token: each token of the chosen answers is three times less likely.
    if not len(run("margin")) or len(nll) < 3 or min(nll.values[-2:]) < nll.values[0] + 1:
        return None
    text = (
        f"Held-out chosen answers became less likely: from {nll.at(0)} to {nll.at(-1)} nats a token"
    )
    margin = run("margin")
    if margin.end > margin.start:
        text += f", while the margin rose to {margin.end_text}"
    return nll.first_step(lambda value: value > nll.values[0]), text


def duplicates(run: History) -> Found:
    """Rows of the data are equal."""
    share = run(DUPLICATES)
    # A fifth: fewer change little more than the weights of some examples.
    if not len(share) or share.values[0] < 0.2:
        return None
    return share.steps[0], f"{share.values[0]:.0%} of the rows are equal to an earlier one"
