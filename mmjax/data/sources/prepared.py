"""Turns the records of a source into samples, with a reader and its metadata index."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mmjax.configurable import ConfigError, require
from mmjax.data.config import DataConfig
from mmjax.data.processor.files import tokenizer_digest
from mmjax.data.processor.template import FolderTemplate
from mmjax.data.sample import Laid, layout_tokens, loss_weight
from mmjax.data.sources import index as indexes
from mmjax.data.sources import storage
from mmjax.data.sources.config import PROMPTS, SourceConfig
from mmjax.data.sources.cutting import cut, cut_points
from mmjax.data.sources.images import Measure, Pictures
from mmjax.data.sources.index import Index, Measured
from mmjax.data.sources.keys import named
from mmjax.data.sources.kinds import make_reader
from mmjax.data.sources.observer import IndexObserver
from mmjax.data.sources.record import Entry, Media, Record
from mmjax.data.sources.recordings import Recordings
from mmjax.data.sources.skipped import Fault, Skipped, one_line, reason_of
from mmjax.data.sources.storage import Unreachable, Unusable
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.turns import Turn, is_prompt, last_answer, last_question, without_literals
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, Tiled, WorstCase

T = TypeVar("T")
_MOST_KEYS = 12
"""Keys of records that are named where nobody reads them."""
_MOST_TEXT, _CHARACTERS_PER_TOKEN, _CHARACTERS_PER_TURN = 1 << 20, 16, 16
"""A longer text than a row can hold by far is not encoded, which takes a hundred times its size in memory."""
_CHANGED = "it is not what it was when it was indexed"


@dataclass(frozen=True, kw_only=True)
class _Record:
    """A record as tokens.

    Attributes:
      record: the record, without turns that were cut off.
      alone: whether its image is the only one of the whole record.
      laid: its tokens.
      images: its images' own sizes, and those of all media that each becomes.
      recordings: frames of each of its recordings.
    """

    record: Record
    alone: bool
    laid: Laid
    images: list[Measure]
    recordings: list[int]


class PreparedRecords:
    """The usable records of one source, by number; the same number is the same sample in every process.

    Args:
      name: the source's name in messages.
      config: the source's configuration.
      data: names the encoders, and the length of a row.
      encoders: specs of the model's encoders.
      tokenizer: the tokenizer.
      cache: the directory of indexes.
      observer: told about the progress, if the index has to be made.
      skipped: records that cannot be used are added to it.

    Raises:
      ConfigError: a setting does not fit the data or the encoders, or no record can be used.
      Unreachable: storage did not answer.
    """

    def __init__(
        self,
        name: str,
        config: SourceConfig,
        data: DataConfig,
        encoders: Mapping[str, EncoderSpec],
        tokenizer: Tokenizer,
        *,
        cache: Path,
        observer: IndexObserver,
        skipped: Skipped,
    ):
        self.name, self.config, self.tokenizer, self.skipped = name, config, tokenizer, skipped
        self._most, self._prompts = data.sequence_length, config.kind == PROMPTS
        self._most_text = max(_MOST_TEXT, _CHARACTERS_PER_TOKEN * self._most)
        try:
            self._template = config.chat(data.tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{name}/{error}") from None
        image, audio = encoders.get(data.image_encoder), encoders.get(data.audio_encoder)
        self._encoders = {
            **({data.image_encoder: image} if image and image.axes == 2 else {}),
            **({data.audio_encoder: audio} if audio and audio.log_mel else {}),
        }
        self._image, self._audio = data.image_encoder, data.audio_encoder
        self._pictures = Pictures(name, config, image) if image and image.axes == 2 else None
        self._sounds = Recordings(config, audio) if audio and audio.log_mel else None
        self.reader = make_reader(name, config, cache)
        made_for = self._made_for(data.tokenizer, data.new_tokens)
        self._path = cache / f"{name}-{hashlib.blake2b(made_for.encode(), digest_size=8).hexdigest()}.index"
        with indexes.alone(self._path):
            self._digest, self.index = self._opened(made_for, observer)
        self.skipped.add(name, self.index.left_out())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "index"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            head, self.index = indexes.read(self._path)
        except (OSError, ValueError) as error:
            raise Unreachable(f"{self._path}: the index cannot be read ({error})") from None
        if head["digest"] != self._digest:
            raise Unreachable(f"{self._path}: the index was made again during the run; start the run again")

    @property
    def identity(self) -> str:
        """A digest of places and counts of the usable records; it does not depend on paths."""
        arrays, other = self.index.arrays().items(), ("names", "faults", "files")
        return indexes.digest({name: array for name, array in arrays if name.split(".")[0] not in other})

    def __len__(self) -> int:
        return len(self.index)

    def meta(self, number: int) -> SampleMeta:
        """The metadata of record `number`, from the index; nothing is opened."""
        tokens, learned = int(self.index.tokens[number]), int(self.index.learned[number])
        about: Any = {"tokens": tokens, "weight": float(self.index.weights[number]), "learned": learned}
        return SampleMeta.of(self._encoders, self._sizes(number), **about)

    def sample(self, number: int, media: Collection[str] | None = None, learned: bool = True) -> Sample:
        """Record `number`, with the media of the encoders `media` alone (by default of all).

        Parts that can no longer be read keep the sizes that the index has: text becomes placeholders and end tokens, a
        medium becomes blank, and in both cases nothing of the record is learned. Each part depends on itself alone, so
        that processes that open different parts agree. Loss weights depend on all parts, so all media are opened for
        them (`learned`).
        """
        faults: list[Fault] = []
        made = self._text(number, faults)
        wanted = set(self._encoders) if media is None else set(media)
        tried = set(self._encoders) if learned and not self.config.strict else wanted
        opened = {name: self._media(name, number, made, faults) for name in self._sizes(number) if name in tried}
        laid = made.laid if made else self._blank(number)
        if faults and self.config.strict:
            raise ConfigError(str(faults[0]))
        self.skipped.add(self.name, faults[:1])
        question, answer = self._texts(made)
        return Sample(
            tokens=np.asarray(laid.tokens, np.int32),
            loss_weights=np.asarray([0.0] * len(laid.tokens) if faults else laid.weights, np.float32),
            media={name: own for name, own in opened.items() if name in wanted},
            question=question,
            answer=answer,
            prompt=laid.prompt,
            asked=np.asarray(laid.asked, np.int32),
            prompt_media=self._before(number, laid) if made else {},
            lead=laid.lead,
            tail=laid.tail,
            media_tokens={name: self.tokenizer.media_token(name) for name in self._encoders},
            broken=(self.name, *faults[0]) if faults else (),
            normalised=(self.config.mean, self.config.std),
            tiled=self._tiled(number),
        )

    def worst_case(self) -> WorstCase:
        """The largest sizes over all records."""
        found, media = self.index, {self._image: self.index.images[:, 1:], self._audio: self.index.recordings[:, None]}
        ends = {self._image: found.image_ends, self._audio: found.recording_ends}
        specs = {name: spec for name, spec in self._encoders.items() if len(media[name])}
        patches = {name: np.prod(media[name] // spec.patch, axis=1) for name, spec in specs.items()}
        return WorstCase(
            tokens=int(found.tokens.max()),
            media={name: int(np.diff(ends[name], prepend=0).max()) for name in specs},
            patches={name: int(own.max()) for name, own in patches.items()},
            sides={name: int(media[name].max()) // spec.patch for name, spec in specs.items()},
        )

    # ---- samples -----------------------------------------------------------------------------------------------------

    def _sizes(self, number: int) -> dict[str, list[tuple[int, ...]]]:
        """Sizes of the media of a record by encoder, from the index; an encoder without media is left out."""
        images = [size for own in self.index.sizes(number) for size in own]
        sizes = {self._image: images, self._audio: [(frames,) for frames in self.index.frames(number)]}
        return {name: own for name, own in sizes.items() if own}

    def _images(self, number: int) -> list[Measure]:
        """The sizes of a record's images, from the index."""
        return list(map(Measure, self.index.upright(number), self.index.sizes(number)))

    def _before(self, number: int, laid: Laid) -> dict[str, int]:
        """How many media of each encoder come before the last answer."""
        images = self.index.sizes(number)[: laid.before.get(self._image, 0)]
        counts = {self._image: sum(map(len, images)), self._audio: laid.before.get(self._audio, 0)}
        return {name: counts[name] for name in self._sizes(number)}

    def _texts(self, made: _Record | None) -> tuple[str, str]:
        """The last question and its answer."""
        if made is None:
            return "", ""
        turns = made.record.dialogue
        answer = "" if is_prompt(turns) else made.laid.answer or turns[last_answer(turns)].text
        question, answer = (self._template.said(without_literals(text)) for text in (last_question(turns), answer))
        return question, answer

    def _tiled(self, number: int) -> dict[str, tuple[Tiled, ...]]:
        """How each image of a record was cut; nothing where the LLM takes the encoder's media one by one."""
        if not self._pictures or not self._pictures.spec.newline:
            return {}
        return {self._image: tuple(map(self._pictures.tiled, self._images(number)))}

    def _text(self, number: int, faults: list[Fault]) -> _Record | None:
        """The record as tokens, no medium opened; None, and a fault in `faults`, if it differs from the index."""
        found = self.index
        with self._noting(faults, number):
            record = self.reader.read(tuple(found.places[number].tolist()))
            kept = cut(record, int(found.turns[number]))
            images = self._images(number)
            recordings = found.frames(number)
            if (len(kept.images), len(kept.recordings)) == (len(images), len(recordings)):
                made = self._tokens(kept, images, recordings, len(record.images) == 1)
                weight = loss_weight(np.asarray(made.laid.weights, np.float32))
                if (len(made.laid.tokens), weight) == (found.tokens[number], found.weights[number]):
                    return made
            raise Unusable(_CHANGED, record=record.id)
        return None

    def _media(self, name: str, number: int, made: _Record | None, faults: list[Fault]) -> tuple[np.ndarray, ...]:
        """The media of an encoder; those that cannot be read are blank, with the reasons in `faults`."""
        images, frames = self.index.sizes(number), [[(n,)] for n in self.index.frames(number)]
        indexed = images if name == self._image else frames
        coded = (made.record.images if name == self._image else made.record.recordings) if made else ()
        media: list[np.ndarray] = []
        for at, sizes in enumerate(indexed):
            blank = [np.zeros((*size, self._encoders[name].channels), np.float32) for size in sizes]
            if made and coded:
                with self._noting(faults, number, made.record.id), self._naming(coded[at], name, at):
                    own = self._decoded(name, coded[at].read(self.config.byte_limit), alone=made.alone)
                    if [medium.shape for medium in own] != [medium.shape for medium in blank]:
                        raise Unusable(_CHANGED)
                    blank = own
            media += blank
        return tuple(media)

    def _decoded(self, name: str, data: bytes, alone: bool) -> list[np.ndarray]:
        if name == self._image:
            assert self._pictures
            return self._pictures.media(data, alone=alone)
        assert self._sounds
        return [self._sounds(data)]

    @contextmanager
    def _noting(self, faults: list[Fault], number: int, record: str = "") -> Iterator[None]:
        """A context whose errors are added to `faults`, as faults of record `number` with the id `record`.

        ConfigError and Unreachable are raised.
        """
        try:
            yield
        except (ConfigError, Unreachable):
            raise
        except Exception as error:  # decoders may raise anything on broken files
            faults.append(Fault.of(self.index.names[number], error, record))

    @contextmanager
    def _naming(self, media: Media, name: str, at: int) -> Iterator[None]:
        """A context whose errors become Unusable and name a medium, number `at` of those for the encoder `name`.

        ConfigError and Unreachable are raised as they are.
        """
        try:
            yield
        except (ConfigError, Unreachable):
            raise
        except Exception as error:
            own = f"{'image' if name == self._image else 'recording'} {at + 1}"
            raise Unusable(reason_of(error), medium=media.path or f"{own} ({media.name})") from error

    def _blank(self, number: int) -> Laid:
        """Tokens without text: the placeholders of all media, and end tokens up to the length in the index."""
        length = int(self.index.tokens[number])
        tokens = [self.tokenizer.eos]
        counts = {self._image: [self._tokens_of(image) for image in self._images(number)]}
        counts[self._audio] = [self._encoders[self._audio].tokens(frames) for frames in self.index.frames(number)]
        for name in self._sizes(number):
            tokens += [self.tokenizer.media_token(name)] * sum(counts[name])
        tokens += [self.tokenizer.eos] * (length - len(tokens))
        return Laid(tokens=tokens, weights=[0.0] * length, prompt=length, lead="", tail="")

    def _laid(self, record: Record) -> _Record:
        """A record as tokens, its media measured. Raises Unusable."""
        for media, able, what in ((record.images, self._pictures, "image"), (record.recordings, self._sounds, "sound")):
            if media and not able:
                raise Unusable(f"it has an {what}, and no encoder of the model takes one")
        alone = len(record.images) == 1
        measure = partial(self._pictures.measure_file, alone=alone) if self._pictures else None
        images = [self._measured_medium(measure, self._image, n, one) for n, one in enumerate(record.images) if measure]
        recordings = [
            self._measured_medium(self._frames, self._audio, n, one) for n, one in enumerate(record.recordings)
        ]
        record = self._bounded(record)
        made = self._tokens(record, images, recordings, alone)
        if not self._prompts and not any(made.laid.weights):
            raise Unusable("none of its answers is learned")
        if self.config.strict or len(made.laid.tokens) <= self._most:
            return made
        if self.config.cut:
            # As many turns as fit: the tokens rise with their number.
            shorter = cut_points(record.dialogue)
            fitting = bisect.bisect_right(
                shorter,
                self._most,
                key=lambda n: len(self._tokens(cut(record, n), images, recordings, alone).laid.tokens),
            )
            if fitting:
                return self._tokens(cut(record, shorter[fitting - 1]), images, recordings, alone)
        raise Unusable(f"{len(made.laid.tokens)} tokens; Data.sequence_length is {self._most}")

    def _bounded(self, record: Record) -> Record:
        """The record, under `cut` without the last turns of a text that is far too long to be encoded."""
        points = cut_points(record.dialogue) if self.config.cut else []
        while points and _text_size(record) > self._most_text:
            middle = len(points) // 2
            record, points = cut(record, points[middle]), points[:middle]
        return record

    def _measured_medium(self, measure: Callable[[Media], T], name: str, at: int, media: Media) -> T:
        with self._naming(media, name, at):
            return measure(media)

    def _frames(self, recording: Media) -> int:
        assert self._sounds
        return self._sounds.frames(recording.read(self.config.byte_limit))

    def _tokens(self, record: Record, images: Sequence[Measure], recordings: Sequence[int], alone: bool) -> _Record:
        if (size := _text_size(record)) > self._most_text:
            raise Unusable(f"about {size} characters; Data.sequence_length is {self._most} tokens")
        images, recordings = list(images[: len(record.images)]), list(recordings[: len(record.recordings)])
        counts: dict[str, list[int]] = {}
        if images:
            counts[self._image] = [self._tokens_of(image) for image in images]
        if recordings:
            counts[self._audio] = [self._encoders[self._audio].tokens(frames) for frames in recordings]
        system = record.system or self.config.system
        about: Any = {"template": self._template, "system": system, "tools": record.tools}
        laid = layout_tokens(self.tokenizer, self._encoders, counts, record.dialogue, **about)
        return _Record(record=record, alone=alone, laid=laid, images=images, recordings=recordings)

    def _tokens_of(self, image: Measure) -> int:
        """LLM tokens of an image."""
        assert self._pictures
        return self._pictures.tokens(image)

    # ---- the index ---------------------------------------------------------------------------------------------------

    def _made_for(self, tokenizer: str, new_tokens: Sequence[str]) -> str:
        """All that the index depends on except the files' contents, as JSON."""
        own = {key: value for key, value in asdict(self.config).items() if key not in ("held_out", "preset")}
        specs = {
            name: [spec.patch, spec.merge, spec.channels, asdict(spec.log_mel) if spec.log_mel else None]
            + ([spec.most_tiles] if spec.newline else [])
            for name, spec in self._encoders.items()
        }
        vocabulary = [tokenizer_digest(tokenizer), *new_tokens] if new_tokens else tokenizer_digest(tokenizer)
        length = 0 if self.config.strict else self._most
        # A relative path names another file in another working directory.
        here = os.getcwd() if any(map(_is_relative, (self.config.path, self.config.media))) else ""
        return json.dumps(
            [indexes.FORMAT, own, asdict(self._template), specs, vocabulary, length, here], sort_keys=True
        )

    def _opened(self, made_for: str, observer: IndexObserver) -> tuple[str, Index]:
        if self._path.exists():
            try:
                head, found = indexes.read(self._path)
                changed = head["made_for"] != made_for or not set(self.reader.files()) <= set(found.files)
                if not changed and indexes.fingerprint(found.files) == head["files"]:
                    return head["digest"], found
                observer.message(f"{self.name}: the data has changed since it was indexed; its index is made again")
            except (OSError, ValueError) as error:
                observer.message(f"{self.name}: {self._path} cannot be used ({error}); the index is made again")
        made = self._made(observer)
        digest = indexes.write(self._path, made, made_for, indexes.fingerprint(made.files))
        return digest, indexes.read(self._path)[1]

    def _made(self, observer: IndexObserver) -> Index:
        entries = list(self.reader.scan())
        faults: list[Fault] = []
        files: dict[str, None] = dict.fromkeys(self.reader.files())
        good: list[Measured] = []
        unread = Counter[str]()
        with observer.progress(len(entries), f"indexing {self.name}") as done:
            for number, entry in enumerate(entries):
                measured = self._measured(number, entry, files, unread)
                if isinstance(measured, Fault):
                    faults.append(measured)
                    if self.config.strict:
                        raise ConfigError(str(measured))
                else:
                    good.append(measured)
                done(number + 1)
        shown = f"; the first, {faults[0]}" if faults else ""
        fix = f"none of {len(entries)} records can be used{shown}" if entries else "it holds no samples"
        require(bool(good), f"{self.name}/Source.path", self.config.path, fix)
        if faults:
            observer.message(f"{self.name}: {len(faults)} of {len(entries)} records cannot be used and are left out")
        if unread:
            keys = ", ".join(f"{key!r} ({count} records)" for key, count in unread.most_common(_MOST_KEYS))
            observer.message(f"{self.name}: keys that are not read: {keys}{', …' * (len(unread) > _MOST_KEYS)}")
        return indexes.collect(good, faults=faults, files=files)

    def _measured(self, number: int, entry: Entry, files: dict[str, None], unread: Counter[str]) -> Measured | Fault:
        """The index's entry for a record, or why it cannot be used.

        The files of its media are added to `files`, its keys that nobody reads to `unread`.
        """
        if entry.fault:
            return Fault(entry.name, one_line(entry.fault))
        record = None
        try:
            record = self.reader.read(entry.place)
            for media in (*record.images, *record.recordings):
                if media.path and not storage.is_url(media.path):
                    files[media.path] = None
            made = self._laid(record)
            unread.update(dict.fromkeys([*record.unread, *self._unread(record.dialogue)], 1))
        except (ConfigError, Unreachable):
            raise
        except Exception as error:  # see `sample`
            return Fault.of(entry.name, error, record.id if record else "")
        return Measured(
            number=number,
            name=entry.name,
            place=entry.place,
            turns=len(made.record.dialogue),
            tokens=len(made.laid.tokens),
            learned=int(np.count_nonzero(made.laid.weights)),
            weight=loss_weight(np.asarray(made.laid.weights, np.float32)),
            images=tuple(tuple(own.media) for own in made.images),
            originals=tuple(own.original for own in made.images),
            recordings=tuple(made.recordings),
            key=indexes.key_of(record, self.config.question),
        )

    def _unread(self, turns: Sequence[Turn]) -> tuple[str, ...]:
        """The keys of turns that the template does not read."""
        keys = dict.fromkeys(key for turn in turns for key in turn.keys if key != "content")
        return named(
            key for key in keys if not (isinstance(self._template, FolderTemplate) and self._template.reads(key))
        )


def _text_size(record: Record) -> int:
    """Characters of a record's text, and some for each turn, which a template writes."""
    turns = sum(len(turn.text) + _characters(turn.keys) + _CHARACTERS_PER_TURN for turn in record.dialogue)
    return turns + len(record.system) + _characters(record.tools)


def _characters(value: object) -> int:
    """Characters of all texts in a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(inner) for inner in value.values())
    return sum(_characters(inner) for inner in value) if isinstance(value, list | tuple) else 0


def _is_relative(path: str) -> bool:
    return bool(path) and not storage.is_url(path) and not os.path.isabs(path)
