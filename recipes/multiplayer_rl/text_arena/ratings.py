"""Elo ratings and the win-rate matrix of a league."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Results = Mapping[tuple[str, str], tuple[int, ...]]
"""(player, opponent) -> wins, draws and losses of the player."""

FIRST_RATING = 1000.0
_POINTS = 400 / np.log(10)  # Elo: 400 points are odds of ten to one
_PRIOR = 800.0


def elo(results: Results) -> dict[str, float]:
    """Returns the rating of each player; the first one in ``results`` has 1000.

    They are the most probable ratings of a Bradley-Terry model; a draw is half a win. A weak normal
    prior (standard deviation 800) keeps the rating of a player finite who won all games.
    """
    players = list(dict.fromkeys(name for pair in results for name in pair))
    index = {name: i for i, name in enumerate(players)}
    games = [
        (index[a], index[b], wins + draws / 2, wins + draws + losses)
        for (a, b), (wins, draws, losses) in results.items()
    ]
    rating = np.zeros(len(players))
    # Newton's method on a concave function; a few rounds are enough for any league.
    for _ in range(50):
        gradient = -rating / (_PRIOR / _POINTS) ** 2
        curvature = np.eye(len(players)) / (_PRIOR / _POINTS) ** 2
        for a, b, points, played in games:
            expected = 1 / (1 + np.exp(rating[b] - rating[a]))
            slope = points - played * expected
            weight = played * expected * (1 - expected)
            gradient[a] += slope
            gradient[b] -= slope
            curvature[a, a] += weight
            curvature[b, b] += weight
            curvature[a, b] -= weight
            curvature[b, a] -= weight
        change = np.linalg.solve(curvature, gradient)
        rating += np.clip(change, -2.0, 2.0)
        if np.abs(change).max(initial=0.0) < 1e-9:
            break
    return {
        name: float(FIRST_RATING + (rating[i] - rating[0]) * _POINTS) for name, i in index.items()
    }


def league_table(results: Results, ratings: Mapping[str, float]) -> str:
    """Returns a Markdown page: ratings, and the score of each row against each column."""
    names = list(ratings)
    lines = [
        "# League",
        "",
        "Share of points of the row against the column: a win counts 1, a draw 0.5. Elo: the first "
        "snapshot has 1000.",
        "",
        "| | Elo | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for row in names:
        cells = [_score(results, row, column) for column in names]
        lines.append(f"| {row} | {ratings[row]:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _score(results: Results, row: str, column: str) -> str:
    wins = draws = losses = 0
    # A pair is stored once, from the side of the later snapshot.
    if (row, column) in results:
        wins, draws, losses = results[row, column]
    elif (column, row) in results:
        losses, draws, wins = results[column, row]
    played = wins + draws + losses
    return f"{(wins + draws / 2) / played:.2f}" if played else ""
