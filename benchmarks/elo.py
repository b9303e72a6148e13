"""How near the rating of a simulated contestant comes to its true one, and how often its interval holds that.

    python benchmarks/elo.py [--contestants 300] [--problems 400] [--luck 300]

Problems are rated 800 to 3,500 in steps of 100, drawn anew for every contestant. Prints a row for every true rating
and number of attempts at each problem:

    bound      Cramer-Rao: no unbiased estimate has a smaller standard deviation, points
    rms        root mean square error, points
    mean       mean absolute error, points
    under 30   share of contestants whose error is under 30 points
    allowed    that share for a normal error whose deviation is the bound
    covered    share of contestants whose 95% interval holds the true rating

--luck makes every problem suit a contestant by that many points (standard deviation) more or less than its rating says:
what coverage is worth where attempts at one problem are not independent. The bound then does not hold.
"""

from __future__ import annotations

import argparse
import math
from statistics import NormalDist

import numpy as np

from gspo.evaluation.elo import POINTS, elo, solve_probability

PROBLEMS = np.arange(800, 3501, 100)
RATINGS = (800, 1200, 1600, 2000, 2400, 2800)
ATTEMPTS = (1, 2, 4, 8, 16)


def bound(rating: float, problems: int, attempts: int) -> float:
    """1 / sqrt(information), points; an attempt at one problem holds p (1 - p) (ln 10 / 400)^2 of it."""
    p = solve_probability(rating, PROBLEMS)
    return POINTS / math.log(10) / math.sqrt(problems * attempts * float((p * (1 - p)).mean()))


def under(points: float, deviation: float) -> float:
    """Share of normal errors of that deviation below so many points, by absolute value."""
    return 2 * NormalDist().cdf(points / deviation) - 1


def simulate(
    rating: float, attempts: int, contestants: int, problems: int, luck: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Errors, points [contestants], and whether the interval holds the true rating, bool [contestants]."""
    rng = np.random.default_rng([int(rating), attempts, problems, int(luck)])
    errors, covered = [], []
    for _ in range(contestants):
        difficulty = rng.choice(PROBLEMS, problems).astype(float)
        p = solve_probability(rating, difficulty + luck * rng.normal(size=problems))
        found = elo(difficulty.tolist(), rng.binomial(attempts, p).tolist(), [attempts] * problems)
        errors.append(math.inf if found.rating is None else found.rating - rating)
        covered.append((found.low is None or found.low <= rating) and (found.high is None or rating <= found.high))
    return np.array(errors), np.array(covered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", type=int, default=300)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--luck", type=float, default=0.0)
    args = parser.parse_args()
    best = POINTS / math.log(10) * 2 / math.sqrt(args.problems)
    print(f"{args.problems} problems, {args.contestants} contestants a row, luck {args.luck:g}")
    print(
        f"one attempt, every problem rated as the contestant is: bound {best:.1f} points, allowed {under(30, best):.3f}\n"
    )
    print("| rating | attempts | bound | rms | mean | under 30 | allowed | covered |\n|---|---|---|---|---|---|---|---|")
    for rating in RATINGS:
        for attempts in ATTEMPTS:
            errors, covered = simulate(rating, attempts, args.contestants, args.problems, args.luck)
            least = bound(rating, args.problems, attempts)
            numbers = (least, np.sqrt(np.mean(errors**2)), np.abs(errors).mean())
            shares = (np.mean(np.abs(errors) < 30), under(30, least), covered.mean())
            cells = [f"{x:.1f}" for x in numbers] + [f"{x:.3f}" for x in shares]
            print(f"| {rating} | {attempts} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
