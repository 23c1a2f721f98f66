"""The task 'digits': rows of handwritten digits and digits dialled, to be read, heard, compared and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.data.log_mel import LogMel
from mmjax.data.source import Source
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.digits.dtmf import CODES, LEAST_RATE
from mmjax.data.tasks.task import Task, TaskContext
from mmjax.flags import counted


class Digits(Task):
    """Samples of the bundled digits, see `DigitsSource`."""

    config: DigitsConfig
    Config = DigitsConfig
    drawing_fix = "Digits.draw to 1.0"
    saying_fix = "Digits.say to 1.0"
    codes = CODES
    unit = "digit"
    reads_drawings = True
    exchanges = True

    @property
    def media(self) -> tuple[str, ...]:
        """The media that some samples have: "image", "recording" or both."""
        counts = {"image": self.config.images, "recording": self.config.calls}
        return tuple(medium for medium, (_, most) in counts.items() if most)

    @property
    def draws(self) -> bool:
        """Whether some samples have a picture to be drawn."""
        return self.config.draw > 0

    @property
    def says(self) -> bool:
        """Whether some samples have a recording to be made."""
        return self.config.say > 0 and self.config.images[1] > 0

    def open(self, context: TaskContext) -> Source:
        """The samples of the task.

        Raises ConfigError if the audio encoder's sample rate is too low for calls, or the generator that speaks has too
        few codes.
        """
        from mmjax.data.tasks.digits.source import DigitsSource  # imports libraries that read media

        data, encoders = context.data, context.encoders
        if data.speaker in encoders and (codes := encoders[data.speaker].codes):
            fix = f"answers are spoken in {CODES} codes; set it to {CODES}"
            require(codes >= CODES, f"{data.speaker}/Decoder.vocab", codes, fix)
        hears, says = self.config.calls[1], self.says
        for name, family, has_calls in ((data.audio_encoder, "Whisper", hears), (data.speaker, "SoundDiT", says)):
            log_mel = encoders[name].log_mel if has_calls else None
            fix = f"calls have tones of up to 1477 Hz; set it to {LEAST_RATE} or more"
            if log_mel:
                require(log_mel.sample_rate >= LEAST_RATE, f"{name}/{family}.sample_rate", log_mel.sample_rate, fix)
        return DigitsSource(
            data, encoders, context.tokenizer, settings=self.config, seed=context.seed, split=context.split
        )

    def check_generator(self, name: str, legal: Sequence[str]) -> None:
        """See `Task.check_generator`."""
        if self.draws:
            fix = "nothing in the model draws; set it to 0.0, or Model.generators to {'painter': 'dit'}"
            require(bool(legal), "Digits.draw", self.config.draw, fix)
            one_of("Data.generator", name, legal)

    def read_drawing(self, drawing: Any, count: int) -> str:
        """The first `count` digits, side by side, of a drawing; see `recognise.read_drawing`."""
        from mmjax.data.tasks.digits.recognise import read_drawing  # fits a classifier

        return read_drawing(drawing, count, self.config.drawn_scale)

    def read_recording(self, frames_FM: Any, count: int, log_mel: LogMel) -> str:
        """The first `count` digits of a recording that was made; see `recognise_calls.read_call`."""
        from mmjax.data.tasks.digits.recognise_calls import read_call  # fits a classifier

        return read_call(frames_FM, count, log_mel, self.config)

    def changes(self, global_batch: int) -> Mapping[int, str]:
        """The later changes of the curriculum; see `Task.changes`."""
        return {
            first // global_batch + 1: f"up to {counted(most, 'digit')}"
            for first, most in ((first, min(digits, self.config.digits[1])) for first, digits in self.config.curriculum)
            if first
        }
