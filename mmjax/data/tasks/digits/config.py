"""The configurable `Digits`: the settings of the task, and the kinds of its questions."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.configurable import configurable, not_negative, positive, require

IMAGE_QUESTIONS, CALL_QUESTIONS, JOINT_QUESTIONS = ("read", "count", "sum"), ("hear",), ("both", "same")
DRAW, SAY = "draw", "say"
QUESTION_KINDS = (*IMAGE_QUESTIONS, *CALL_QUESTIONS, *JOINT_QUESTIONS, DRAW, SAY)
MOST_MEDIA, MOST_DIGITS = 4, 6


@configurable("Digits")
@dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """The task 'digits': rows of handwritten digits and digits dialled. All ranges are inclusive.

    images, calls: how many images and telephone calls a sample has. digits: how many digits an image has and a call.
    scale: height of a digit, in units of its 8 pixels. aspect: extra horizontal stretch of a row.
    distortion: strength of the random affine map of each training digit (0.1 = up to 10 % of stretch and shear, 5 % of
    shift). tone, gap: seconds of a dialled key and of the silence around it. level: amplitude of a call. noise: of
    white noise, in units of that. read, count, sum: relative frequencies of the questions about an image.
    hear: the frequency of the question about a call. both, same: the frequencies of the questions about an image and a
    call (to read both; whether their digits are the same).
    draw: of drawing the digits of an image or a call, as others have written them, and saying them.
    say: of saying the digits of an image by a recording, in which they are dialled, and in words.
    drawn_scale: pixels of a side of the square that a pixel of a drawn digit fills.
    turns: questions asked about each training sample (evaluation asks one).
    curriculum: pairs (from this training sample on, at most so many digits), ascending; () = none.
    """

    images: tuple[int, int] = (2, 2)
    calls: tuple[int, int] = (0, 0)
    digits: tuple[int, int] = (1, 4)
    scale: tuple[float, float] = (1.0, 1.5)
    aspect: tuple[float, float] = (0.8, 1.25)
    distortion: float = 0.0
    tone: tuple[float, float] = (0.06, 0.12)
    gap: tuple[float, float] = (0.03, 0.08)
    level: tuple[float, float] = (0.1, 1.0)
    noise: tuple[float, float] = (0.0, 0.2)
    read: float = 1.0
    count: float = 0.0
    sum: float = 0.0
    hear: float = 0.0
    both: float = 0.0
    same: float = 0.0
    draw: float = 0.0
    say: float = 0.0
    drawn_scale: int = 1
    turns: int = 1
    curriculum: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        positive("Digits.turns", self.turns)
        positive("Digits.drawn_scale", self.drawn_scale)
        for name in ("distortion", *QUESTION_KINDS):
            not_negative(f"Digits.{name}", getattr(self, name))
        for name, least, most in (("images", 0, MOST_MEDIA), ("calls", 0, MOST_MEDIA), ("digits", 1, MOST_DIGITS)):
            low, high = self._pair(name)
            fix = f"must ascend within {least} to {most}"
            require(least <= low <= high <= most, f"Digits.{name}", (low, high), fix)
        for name in ("scale", "aspect", "tone", "gap", "level"):
            low, high = self._pair(name)
            require(0 < low <= high, f"Digits.{name}", (low, high), "must ascend from above 0, such as (0.8, 1.25)")
        low, high = self._pair("noise")
        require(0 <= low <= high, "Digits.noise", (low, high), "must ascend from 0 or more, such as (0.0, 0.2)")
        self._check_questions()
        self._check_curriculum()

    def idle(self) -> dict[str, str]:
        """The settings without effect, given the others: the reason by name, such as "tone"."""
        reasons: dict[str, str] = {}
        if not self.draw:
            reasons["drawn_scale"] = f"Digits.draw={self.draw}: nothing is drawn"
        if not self.calls[1]:
            of_calls = () if self.say and self.images[1] else ("tone", "gap", "level", "noise")
            names = (*of_calls, *CALL_QUESTIONS, *JOINT_QUESTIONS)
            reasons |= dict.fromkeys(names, f"Digits.calls={self.calls}: no sample has a call")
        if not self.images[1]:
            names = (*(() if self.draw else ("scale", "aspect", "distortion")), *IMAGE_QUESTIONS, *JOINT_QUESTIONS, SAY)
            reasons |= dict.fromkeys(names, f"Digits.images={self.images}: no sample has an image")
        return reasons

    def kinds(self, images: int, calls: int) -> tuple[str, ...]:
        """The kinds, of `QUESTION_KINDS`, of questions about a sample with `images` images and `calls` calls."""
        possible = (
            *(IMAGE_QUESTIONS if images else ()),
            *(CALL_QUESTIONS if calls else ()),
            *(JOINT_QUESTIONS if images and calls else ()),
            DRAW,
            *((SAY,) if images else ()),
        )
        return tuple(kind for kind in possible if getattr(self, kind) > 0)

    def _check_questions(self) -> None:
        images, calls = self.images[0], self.calls[0]
        require(images + calls > 0, "Digits.images", self.images, "a sample may be empty; set it to (1, 1)")
        kind = "read" if images else "hear"
        fix = f"nothing can be asked about a sample of {images} images and {calls} calls; set it to 1.0"
        require(bool(self.kinds(images, calls)), f"Digits.{kind}", getattr(self, kind), fix)

    def _pair(self, name: str) -> tuple[float, float]:
        value = getattr(self, name)
        require(len(value) == 2, f"Digits.{name}", value, "must be a pair (low, high)")
        return value[0], value[1]

    def _check_curriculum(self) -> None:
        fix = "must be pairs (training sample, digits), ascending, such as ((0, 1), (10000, 4))"
        starts = [start for start, _ in self.curriculum]
        legal = starts == sorted(set(starts)) and all(start >= 0 and digits > 0 for start, digits in self.curriculum)
        require(legal, "Digits.curriculum", self.curriculum, fix)
