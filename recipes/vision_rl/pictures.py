"""Generated pictures with a question, whose answer is a number that the generator knows.

``count``: how many shapes there are (1 to 6). ``number``: which number is written (10 to 99).
``chart``: how high a bar is (1 to 5).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinker_cookbook.image_processing_utils import pillow
from tinker_cookbook.renderers import ImagePart, Message, TextPart

if TYPE_CHECKING:
    from PIL import Image

Kind = Literal["count", "number", "chart"]
KINDS: tuple[Kind, ...] = ("count", "number", "chart")
SIDE = 24
"""Width and height of a picture in pixels."""

_BARS = {"red": (230, 50, 40), "green": (40, 190, 60), "blue": (60, 90, 240)}
_HIGHEST = 5
_CELL, _CELLS = 8, 3
"""Shapes are in cells of this size, with this many in a row, so that none touches another."""


@dataclass(frozen=True)
class Picture:
    """One task: kind of picture, and the seed of its content."""

    kind: Kind
    seed: int

    def draw(self) -> tuple[Image.Image, str, str]:
        """Returns the picture, the question and the answer."""
        rng = random.Random(f"{self.kind} {self.seed}")
        image = pillow().new("RGB", (SIDE, SIDE), (rng.randrange(40),) * 3)
        question, answer = _DRAW[self.kind](image, rng)
        return image, question, str(answer)

    def message(self) -> Message:
        """Returns the user's message: the picture, then the question."""
        image, question, _ = self.draw()
        picture = ImagePart(type="image", image=image)
        return Message(role="user", content=[picture, TextPart(type="text", text=question)])


def make_pictures(count: int, seed: int, kinds: Sequence[Kind] = KINDS) -> list[Picture]:
    """Returns pictures of all kinds in turn."""
    rng = random.Random(seed)
    return [Picture(kinds[i % len(kinds)], rng.randrange(1 << 40)) for i in range(count)]


def texts() -> list[str]:
    """Returns texts with all words of the questions."""
    return [Picture(kind, seed).draw()[1] for kind in KINDS for seed in range(50)]


def _draw_shapes(image: Image.Image, rng: random.Random) -> tuple[str, int]:
    count = rng.randint(1, 6)
    pen = _pen(image)
    for cell in rng.sample(range(_CELLS * _CELLS), count):
        size = rng.randint(4, 6)
        left, top = (
            _CELL * place + rng.randint(0, _CELL - 2 - size)
            for place in (cell % _CELLS, cell // _CELLS)
        )
        box = (left, top, left + size, top + size)
        colour = _bright(rng)
        shape = rng.choice(("circle", "square", "triangle"))
        if shape == "circle":
            pen.ellipse(box, fill=colour)
        elif shape == "square":
            pen.rectangle(box, fill=colour)
        else:
            corners = [(left + size // 2, top), (left, top + size), (left + size, top + size)]
            pen.polygon(corners, fill=colour)
    return "How many shapes?", count


def _draw_number(image: Image.Image, rng: random.Random) -> tuple[str, int]:
    from PIL import ImageFont

    number = rng.randint(10, 99)
    # The font that Pillow contains, so that pictures do not depend on the machine's fonts.
    font: Any = ImageFont.load_default(18)
    place = (rng.randint(1, 3), rng.randint(0, 3))
    _pen(image).text(place, str(number), fill=_bright(rng), font=font)
    return "Which number?", number


def _draw_chart(image: Image.Image, rng: random.Random) -> tuple[str, int]:
    pen, unit, floor = _pen(image), 4, SIDE - 1
    heights = {colour: rng.randint(1, _HIGHEST) for colour in rng.sample(list(_BARS), len(_BARS))}
    for index, (colour, height) in enumerate(heights.items()):
        left = 1 + _CELL * index
        pen.rectangle((left, floor - unit * height, left + 5, floor), fill=_BARS[colour])
    asked = rng.choice(list(_BARS))
    return f"How high is the {asked} bar?", heights[asked]


_DRAW: dict[Kind, Callable[[Image.Image, random.Random], tuple[str, int]]] = {
    "count": _draw_shapes,
    "number": _draw_number,
    "chart": _draw_chart,
}


def _pen(image: Image.Image) -> Any:
    from PIL import ImageDraw

    return ImageDraw.Draw(image)


def _bright(rng: random.Random) -> tuple[int, int, int]:
    """Returns a colour that differs from the background."""
    red, green, blue = (rng.randint(60, 255) for _ in range(3))
    return max(red, 160), green, blue
