"""`DataSpec`: the data of a run as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.data.config import DataConfig
from mmjax.data.origin import origin_class
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.known_records import KnownRecords
from mmjax.data.tasks.task import Task


@dataclass(frozen=True)
class DataSpec:
    """The data of a run: all that its samples depend on beside the model, the seed and the split.

    Attributes:
      settings: the data's settings.
      task: settings of the task that `settings.task` names, of its class `Config`; None, or those of another task, for
        its defaults.
      sources: the settings of each of `settings.sources`, by name.
      known: by name of a source, the records that a continued run has stored; its held-out records stay held out. They
        are no setting.
    """

    settings: DataConfig = field(default_factory=DataConfig)
    task: Any = None
    sources: Mapping[str, SourceConfig] = field(default_factory=dict)
    known: Mapping[str, KnownRecords] = field(default_factory=dict, compare=False)

    def with_settings(self, **changes: Any) -> DataSpec:
        """A copy in which fields of `settings` have other values, such as `workers=0`. Raises ConfigError."""
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def origin(self) -> Task:
        """The origin of samples: the task with its settings, or the datasets. A user's own task is imported.

        Raises ConfigError if there is no such task.
        """
        cls = origin_class(self.settings)
        if cls.Config is None:
            return cls()
        return cls(self.task if isinstance(self.task, cls.Config) else cls.Config())

    @property
    def drawn(self) -> tuple[str, ...]:
        """Names of the generators for which some samples have a medium to be made.

        They are `Data.generator` for pictures and `Data.speaker` for recordings, or none. There are none either where
        that is known only when samples are read (`Task.draws`).
        """
        settings, origin = self.settings, self.origin
        return (*([settings.generator] if origin.draws else []), *([settings.speaker] if origin.says else []))

    @property
    def spoken(self) -> tuple[str, ...]:
        """Names of the generators for which samples have codes, if the model has them: `Data.speaker`, or none."""
        return (self.settings.speaker,) if self.origin.codes else ()

    def check_modules(self, encoders: Mapping[str, str], generators: Mapping[str, str]) -> None:
        """Raises ConfigError unless the model has the named encoders and generator, if samples have media for them.

        encoders, generators: the model's, each with its medium ("image" or "recording") by name.
        """
        settings, origin = self.settings, self.origin
        for named, medium in (("image_encoder", "image"), ("audio_encoder", "recording")):
            legal = [name for name, of_encoder in encoders.items() if of_encoder == medium]
            if legal if origin.media is None else medium in origin.media:
                fix = f"no encoder of the model takes {medium}s; add one to Model.encoders"
                require(bool(legal), f"Data.{named}", getattr(settings, named), fix)
                one_of(f"Data.{named}", getattr(settings, named), legal)
        drawing = [name for name, medium in generators.items() if medium == "image"]
        origin.check_generator(settings.generator, drawing)
        if origin.says:
            sounding = [name for name, medium in generators.items() if medium == "recording"]
            fix = "nothing in the model makes recordings; set Model.generators to {'talker': 'sound-dit'}"
            require(bool(sounding), "Data.speaker", settings.speaker, fix)
            one_of("Data.speaker", settings.speaker, sounding)
