"""Turns records into tokens, and their files into media of the sizes that the model's encoders take."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from mmjax.configurable import ConfigError, require
from mmjax.data.config import DataConfig
from mmjax.data.pieces import Count, Timed
from mmjax.data.processor.template import FolderTemplate
from mmjax.data.sample import EncodedDialogue, encode_dialogue
from mmjax.data.sources.config import PROMPTS, SourceConfig
from mmjax.data.sources.cutting import cut, cut_points
from mmjax.data.sources.drawings import images_before
from mmjax.data.sources.images import Measure, Pictures
from mmjax.data.sources.keys import named
from mmjax.data.sources.record import Media, Record
from mmjax.data.sources.recordings import Recordings
from mmjax.data.sources.sizes import Size
from mmjax.data.sources.skipped import reason_of
from mmjax.data.sources.sound_tracks import with_sound_tracks
from mmjax.data.sources.storage import Unreachable, Unusable
from mmjax.data.sources.target_latents import targets_of
from mmjax.data.sources.videos import Videos
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.turns import Turn
from mmjax.data.types import EncoderSpec

Item = TypeVar("Item")
_MOST_TEXT, _CHARACTERS_PER_TOKEN, _CHARACTERS_PER_TURN = 1 << 20, 16, 16
"""Limits of texts. A text that is far too long for a row is not encoded: that takes a hundred times its memory."""


@dataclass(frozen=True, kw_only=True)
class TokenizedRecord:
    """A record as tokens.

    Attributes:
      record: the record, without turns that were cut off.
      alone: whether the record, before it was cut, has a single image.
      dialogue: its tokens.
      images: sizes of its images and videos, and of the media that each becomes.
      recordings: number of frames of each of its recordings.
      targets: sizes of its pictures to be made.
    """

    record: Record
    alone: bool
    dialogue: EncodedDialogue
    images: list[Measure]
    recordings: list[int]
    targets: Targets

    def encoded(self, name: str, records: RecordTokenizer) -> tuple[Media, ...]:
        """The record's images, recordings or pictures to be made, whichever the module `name` has."""
        record, pairs = self.record, zip(self.record.targets, self.targets.makers, strict=True)
        made = tuple(medium for medium, maker in pairs if maker == name)
        return {records.image: record.images, records.audio: record.recordings}.get(name, made)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The pictures of a record that generators are to make, in the order of their places.

    Attributes:
      makers: the name of the generator of each.
      sizes: height and width of each.
      references: for each, the images that it is made from: the number of the image in the record, and its size as the
        generator sees it.
    """

    makers: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = ()
    references: tuple[tuple[tuple[int, Size], ...], ...] = ()

    def first(self, count: int) -> Targets:
        """The first `count` pictures."""
        return Targets(makers=self.makers[:count], sizes=self.sizes[:count], references=self.references[:count])

    @property
    def by_generator(self) -> dict[str, list[Size]]:
        """The sizes of the pictures of each generator."""
        return self._by_maker(self.sizes)

    @property
    def reference_sizes(self) -> dict[str, list[list[Size]]]:
        """Sizes of the references of each picture, by generator, of those with any."""
        references = self.references or ((),) * len(self.makers)
        sizes = self._by_maker([[size for _, size in of_one] for of_one in references])
        return {maker: of_maker for maker, of_maker in sizes.items() if any(of_maker)}

    def _by_maker(self, values: Sequence[Item]) -> dict[str, list[Item]]:
        result: dict[str, list[Item]] = {}
        for maker, value in zip(self.makers, values, strict=True):
            result.setdefault(maker, []).append(value)
        return result


class RecordTokenizer:
    """Makes tokens and media of the records of one source.

    Args:
      name: the source's name in messages.
      config: the source's configuration.
      data: names the encoders, and the length of a row.
      encoders: specs of the model's encoders, by name.
      tokenizer: the tokenizer.

    Attributes:
      encoders: specs of the encoders that see media of the source, and of the generators of pictures.
      generators: names of the generators of media in their order in the model.
      drawings: makes the pictures that each generator is to make, by its name.
      image: name of the encoder of images.
      audio: name of the encoder of recordings.
      pictures: makes media of images; None without an encoder for them.
      videos: makes media of videos; None without an encoder for images.
      template: the chat template.

    Raises:
      ConfigError: a setting does not fit the encoders, or the template cannot be read.
    """

    def __init__(
        self,
        name: str,
        config: SourceConfig,
        data: DataConfig,
        encoders: Mapping[str, EncoderSpec],
        tokenizer: Tokenizer,
    ):
        self.config, self.tokenizer, self.sequence_length = config, tokenizer, data.sequence_length
        self._most_text = max(_MOST_TEXT, _CHARACTERS_PER_TOKEN * self.sequence_length)
        try:
            self.template = config.chat(data.tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{name}/{error}") from None
        self.image, self.audio, self._generator = data.image_encoder, data.audio_encoder, data.generator
        image, audio = encoders.get(self.image), encoders.get(self.audio)
        generators = {generator: spec for generator, spec in encoders.items() if spec.drawn and not spec.codes}
        self.encoders = {
            **({self.image: image} if image and image.axes == 2 else {}),
            **({self.audio: audio} if audio and audio.log_mel else {}),
            **generators,
        }
        self.generators = tuple(generators)
        self.drawings = targets_of(name, config, generators)
        self.pictures = Pictures(name, config, image) if image and image.axes == 2 else None
        self.videos = Videos(name, config, image) if image and image.axes == 2 else None
        self._recordings = Recordings(config, audio) if audio and audio.log_mel else None
        fix = "no encoder of the model takes recordings; add one and name it in Data.audio_encoder, or set it to False"
        require(bool(self._recordings) or not config.video_sound, f"{name}/Source.video_sound", value=True, fix=fix)

    def heard(self, record: Record) -> Record:
        """The record with the sound tracks of its videos as recordings, where they are heard."""
        return with_sound_tracks(record, every=self.config.video_sound)

    def measure(self, record: Record) -> TokenizedRecord:
        """Tokenizes a record whose media are not measured yet, cut to the length of a row under `Source.cut`.

        Reads the media's headers. Raises Unusable if the record is too long, none of it is learned, no encoder takes
        its media, or one of them cannot be read; and ValueError if the template does not take the dialogue.
        """
        for media, encoder, kind in (
            (record.images, self.pictures, "an image"),
            (record.recordings, self._recordings, "a sound"),
        ):
            if media and not encoder:
                kind = "a video" if media[0].is_video else kind
                raise Unusable(f"it has {kind}, and no encoder of the model takes one")
        alone = len(record.images) == 1
        images, recordings = list[Measure](), list[int]()
        for number, medium in enumerate(record.images):
            assert self.pictures and self.videos
            if medium.is_video:
                self.videos.require_taken(self.image)
            with self.naming(medium, self.image, number):
                measured = self.videos.measure(medium) if medium.is_video else None
                images.append(measured or self.pictures.measure_file(medium, alone=alone))
        for number, medium in enumerate(record.recordings):
            assert self._recordings
            with self.naming(medium, self.audio, number):
                if medium.is_track:
                    recordings.append(self._recordings.track_frames(medium))
                else:
                    recordings.append(self._recordings.frames(medium.read(self.config.byte_limit)))
        targets = self._measured_targets(record)
        record = self._bounded(record)
        tokenize = partial(self.tokenize, images=images, recordings=recordings, targets=targets, alone=alone)
        tokenized = tokenize(record)
        if self.config.kind != PROMPTS and not any(tokenized.dialogue.weights):
            raise Unusable("none of its answers is learned")
        if self.config.strict or len(tokenized.dialogue.tokens) <= self.sequence_length:
            return tokenized
        if self.config.cut:
            # The largest number of turns that fits: the tokens rise with it.
            points = cut_points(record.dialogue)
            fitting = bisect.bisect_right(
                points, self.sequence_length, key=lambda count: len(tokenize(cut(record, count)).dialogue.tokens)
            )
            if fitting:
                return tokenize(cut(record, points[fitting - 1]))
        raise Unusable(f"{len(tokenized.dialogue.tokens)} tokens; Data.sequence_length is {self.sequence_length}")

    def _measured_targets(self, record: Record) -> Targets:
        """The sizes of a record's pictures to be made. Raises Unusable if no generator makes them, or one is broken."""
        makers, sizes = list[str](), list[Size]()
        for medium in record.targets:
            name = self._maker(medium)
            with self.naming(medium, name, makers.count(name)):
                sizes += self.drawings[name].measure_file(medium, alone=True).media
            makers.append(name)
        before = images_before(record.dialogue, record.images) if record.targets else []
        references = [
            [self._reference(record, name, image) for image in self._referred(name, images)]
            for name, images in zip(makers, before, strict=True)
        ]
        return Targets(makers=tuple(makers), sizes=tuple(sizes), references=tuple(map(tuple, references)))

    def _referred(self, generator: str, images: Sequence[int]) -> Sequence[int]:
        """The last images of those before a picture, as many as its generator takes."""
        most = self.encoders[generator].references
        return images[-most:] if most else []

    def _reference(self, record: Record, generator: str, number: int) -> tuple[int, Size]:
        """The number of an image of the record, and its size as the generator sees it. Raises Unusable."""
        with self.naming(record.images[number], self.image, number):
            return number, self.drawings[generator].reference_size(record.images[number])

    def _maker(self, medium: Media) -> str:
        """The generator of a picture to be made: the one that it names, `Data.generator`, or the only one."""
        generators = self.generators
        if not generators:
            fix = "set Model.generators to {'painter': 'dit'}"
            raise Unusable(f"it has a picture to be made, and no generator of the model makes one: {fix}")
        legal = " or ".join(map(repr, generators))
        if medium.generator and medium.generator not in generators:
            raise Unusable(f"generator={medium.generator!r} makes no pictures in the model; name {legal}")
        is_only = len(generators) == 1 and self._generator not in generators
        name = medium.generator or (generators[0] if is_only else self._generator)
        if name not in generators:
            raise Unusable(
                f"Data.generator={name!r} makes no pictures in the model; name {legal}, there or in the record"
            )
        if name not in self.drawings:
            channels = self.encoders[name].channels
            fix = f"set {name}/DiT.channels, or name latents of the pictures in {name}/Latents.path"
            raise Unusable(f"{name!r} makes {channels} channels, and a picture has 1 or 3: {fix}")
        return name

    def numbered(self, targets: Targets) -> tuple[tuple[int, int, int], ...]:
        """The pictures of `targets`, each with the number of its generator among `generators`, height and width."""
        pairs = zip(targets.makers, targets.sizes, strict=True)
        return tuple((self.generators.index(maker), *size) for maker, size in pairs)

    def numbered_references(self, targets: Targets) -> tuple[tuple[int, int, int, int], ...]:
        """The references of all pictures: the number of the picture, that of the image, its height and its width."""
        numbered = enumerate(targets.references)
        return tuple((target, number, *size) for target, of_one in numbered for number, size in of_one)

    def tokenize(
        self,
        record: Record,
        images: Sequence[Measure],
        recordings: Sequence[int],
        *,
        targets: Targets | None = None,
        alone: bool,
    ) -> TokenizedRecord:
        """The tokens of a record.

        Args:
          record: the record.
          images: sizes of its images and videos; later ones than the record's are ignored.
          recordings: number of frames of its recordings; as above.
          targets: sizes of its pictures to be made; as above.
          alone: see `TokenizedRecord`.

        Raises:
          Unusable: the text is far too long.
          ValueError: the template does not take the dialogue.
        """
        if (size := _text_size(record)) > self._most_text:
            raise Unusable(f"about {size} characters; Data.sequence_length is {self.sequence_length} tokens")
        images, recordings = list(images[: len(record.images)]), list(recordings[: len(record.recordings)])
        targets = targets.first(len(record.targets)) if targets else Targets()
        dialogue = encode_dialogue(
            self.tokenizer,
            self.encoders,
            self._token_counts(images, recordings, targets),
            record.dialogue,
            template=self.template,
            system=record.system or self.config.system,
            tools=record.tools,
            makers=targets.makers,
        )
        return TokenizedRecord(
            record=record, alone=alone, dialogue=dialogue, images=images, recordings=recordings, targets=targets
        )

    def blank(
        self, images: Sequence[Measure], recordings: Sequence[int], targets: Targets, length: int
    ) -> EncodedDialogue:
        """`length` tokens without text: the placeholders of all media, and end tokens around them."""
        tokens = [self.tokenizer.eos]
        for name, counts in self._token_counts(images, recordings, targets).items():
            alike = (count.count * count.patches if isinstance(count, Timed) else count for count in counts)
            tokens += [self.tokenizer.media_token(name)] * sum(alike)
        tokens += [self.tokenizer.eos] * (length - len(tokens))
        return EncodedDialogue(tokens=tokens, weights=[0.0] * length, prompt=length, lead="", tail="")

    def decode(self, name: str, media: Media, measure: Measure | None, *, alone: bool) -> list[np.ndarray]:
        """The media of encoder `name` that an image, a video or a recording becomes, float32 [h, w, C] or [F, M].

        Args:
          name: `image`, `audio`, or the generator that is to make the image.
          media: the image, video or recording.
          measure: the sizes of a video when it was indexed; None for others.
          alone: see `TokenizedRecord`.

        Raises:
          Unusable: it cannot be decoded. Decoders may raise other errors.
        """
        if media.is_video:
            assert self.videos and measure
            return self.videos.media(media, measure)
        if media.is_track:
            assert self._recordings
            return [self._recordings.track(media)]
        data = media.read(self.config.byte_limit)
        if name == self.image:
            assert self.pictures
            return self.pictures.media(data, alone=alone)
        if name in self.drawings:
            return self.drawings[name].media(data)
        assert self._recordings
        return [self._recordings(data)]

    def reference(self, generator: str, media: Media) -> np.ndarray:
        """An image, float32 [h, w, C], as a generator sees it that makes another from it. Raises as `decode` does."""
        return self.drawings[generator].reference(media.read(self.config.byte_limit))

    @contextmanager
    def naming(self, media: Media, name: str, number: int) -> Iterator[None]:
        """A context whose errors become Unusable with the name of a medium.

        ConfigError and Unreachable are raised as they are.

        Args:
          media: the medium.
          name: the encoder that sees it, or the generator that is to make it.
          number: its number, from 0, among the record's media of this encoder.
        """
        try:
            yield
        except (ConfigError, Unreachable):
            raise
        except Exception as error:
            seen = "image" if name == self.image else "recording" if name == self.audio else "drawing"
            kind = "video" if media.is_video else seen
            place = f"{'sound track' if media.is_track else kind} {number + 1}"
            raise Unusable(reason_of(error), medium=media.path or f"{place} ({media.name})") from error

    def unread_keys(self, turns: Sequence[Turn]) -> tuple[str, ...]:
        """The keys of turns that the template does not read, each once."""
        keys = dict.fromkeys(key for turn in turns for key in turn.keys if key != "content")
        template = self.template
        return named(key for key in keys if not (isinstance(template, FolderTemplate) and template.reads(key)))

    def _token_counts(
        self, images: Sequence[Measure], recordings: Sequence[int], targets: Targets
    ) -> dict[str, list[Count]]:
        """Number of LLM tokens of each medium, by encoder or generator; one without media is left out."""
        counts: dict[str, list[Count]] = {}
        if images:
            counts[self.image] = [self._tokens(image) for image in images]
        if recordings:
            counts[self.audio] = [self.encoders[self.audio].tokens(frames) for frames in recordings]
        for maker, sizes in targets.by_generator.items():
            counts[maker] = [self.encoders[maker].tokens(*size) for size in sizes]
        return counts

    def _tokens(self, measure: Measure) -> Count:
        assert self.pictures and self.videos
        if not measure.clip:
            return self.pictures.tokens(measure)
        count, seconds = self.videos.spec.tokens(*measure.media[0]), self.videos.seconds(measure.clip)
        return Timed(count=count, patches=len(measure.media), seconds=seconds)

    def _bounded(self, record: Record) -> Record:
        """The record; under `Source.cut` without its last turns if its text is far too long to be encoded."""
        points = cut_points(record.dialogue) if self.config.cut else []
        while points and _text_size(record) > self._most_text:
            middle = len(points) // 2
            record, points = cut(record, points[middle]), points[:middle]
        return record


def _text_size(record: Record) -> int:
    """Characters of a record's text, with some for each turn, which a template writes."""
    turns = sum(len(turn.text) + _characters(turn.keys) + _CHARACTERS_PER_TURN for turn in record.dialogue)
    return turns + len(record.system) + _characters(record.tools)


def _characters(value: object) -> int:
    """Characters of all texts in a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(inner) for inner in value.values())
    return sum(_characters(inner) for inner in value) if isinstance(value, list | tuple) else 0
