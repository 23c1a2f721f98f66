"""Makes samples of the records of a source, with a reader and a metadata index."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.derived import in_text
from mmjax.data.processor.template import MEDIUM
from mmjax.data.sample import EncodedDialogue, loss_weight
from mmjax.data.sources import index as indexes
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.cutting import cut
from mmjax.data.sources.images import Measure
from mmjax.data.sources.indexing import Indexer, index_settings
from mmjax.data.sources.kinds import make_reader
from mmjax.data.sources.media import Media
from mmjax.data.sources.observer import IndexObserver
from mmjax.data.sources.places import DRAWING
from mmjax.data.sources.skipped import Fault, Skipped
from mmjax.data.sources.storage import Unreachable, Unusable
from mmjax.data.sources.target_latents import blank_medium, unit_distribution
from mmjax.data.sources.tokenized import RecordTokenizer, Targets, TokenizedRecord
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.turns import is_prompt, last_answer, last_question, without_literals
from mmjax.data.types import BLANK, EncoderSpec, Sample, SampleMeta, Tiled, WorstCase

_CHANGED = "it is not what it was when it was indexed"


class PreparedRecords:
    """The usable records of one source, by number from 0; the same number is the same sample in every process.

    Args:
      name: the source's name in messages.
      config: the source's configuration.
      data: names the encoders, and the length of a row.
      encoders: specs of the model's encoders, by name.
      tokenizer: the tokenizer.
      cache: the directory of indexes.
      observer: receives the progress, if the index has to be made.
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
        self.name, self.config, self.skipped = name, config, skipped
        self._records = RecordTokenizer(name, config, data, encoders, tokenizer)
        self.reader = make_reader(name, config, cache)
        settings = index_settings(self._records, data)
        self._path = cache / f"{name}-{hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()}.index"
        indexer = Indexer(name=name, reader=self.reader, records=self._records, observer=observer)
        with indexes.exclusive(self._path):
            self._digest, self.index = indexer.open(self._path, settings)
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
        arrays, of_paths = self.index.arrays().items(), ("names", "faults", "files")
        return indexes.digest({name: array for name, array in arrays if name.split(".")[0] not in of_paths})

    @property
    def generators(self) -> dict[str, EncoderSpec]:
        """Specs of the generators that make pictures of records, by name."""
        return {name: self._records.encoders[name] for name in self._records.drawings}

    def __len__(self) -> int:
        return len(self.index)

    def meta(self, number: int) -> SampleMeta:
        """The metadata of record `number`, from the index; nothing is opened."""
        return SampleMeta.of(
            self._records.encoders,
            self._sizes(number),
            tokens=int(self.index.tokens[number]),
            weight=float(self.index.weights[number]),
            learned=int(self.index.learned[number]),
            references=self._targets(number).reference_sizes,
        )

    def sample(self, number: int, media: Collection[str] | None = None, *, learned: bool = True) -> Sample:
        """Record `number`, with the media of the encoders `media` alone (by default of all).

        Parts that can no longer be read keep the sizes that the index has: text becomes placeholders and end tokens, a
        medium becomes blank, and nothing of the record is learned. Each part depends on itself alone, so that processes
        that open different parts agree. Loss weights depend on all parts, so with `learned` all media are opened.

        Raises ConfigError instead if the source is strict, and Unreachable if storage did not answer.
        """
        faults: list[Fault] = []
        tokenized, encoders = self._tokenized(number, faults), self._records.encoders
        generator_of = {spec.encoder: name for name, spec in encoders.items() if spec.encoder}
        wanted = {*encoders, *generator_of} if media is None else set(media)
        read = {generator_of.get(name, name) for name in wanted}
        # A generator learns nothing of a record of which some part is broken either.
        learned = learned or any(encoders[name].drawn for name in read & set(encoders))
        tried = set(encoders) if learned and not self.config.strict else read
        opened = {name: self._media(name, number, tokenized, faults) for name in self._sizes(number) if name in tried}
        references = self._references(number, tried, tokenized, faults)
        for name in generator_of.values() & opened.keys():
            self._hand_over(name, number, opened, references)
        dialogue = tokenized.dialogue if tokenized else self._blank(number)
        if faults and self.config.strict:
            raise ConfigError(str(faults[0]))
        self.skipped.add(self.name, faults[:1])
        question, answer = self._texts(tokenized)
        return Sample(
            tokens=np.asarray(dialogue.tokens, np.int32),
            loss_weights=np.asarray([0.0] * len(dialogue.tokens) if faults else dialogue.weights, np.float32),
            media={name: arrays for name, arrays in opened.items() if name in wanted},
            question=question,
            answer=answer,
            prompt=dialogue.prompt,
            prompt_tokens=np.asarray(dialogue.prompt_tokens, np.int32),
            prompt_media=self._prompt_media(number, dialogue) if tokenized else {},
            lead=dialogue.lead,
            tail=dialogue.tail,
            media_tokens={name: self._records.tokenizer.media_token(name) for name in in_text(encoders)},
            video_tokens={name: self._records.tokenizer.video_token(name) for name in in_text(encoders)},
            references={name: pictures for name, pictures in references.items() if name in wanted},
            broken=(self.name, *faults[0]) if faults else (),
            normalised=(self.config.mean, self.config.std),
            tiled=self._tiled(number),
            video_times=self._video_times(number),
        )

    def worst_case(self) -> WorstCase:
        """The largest sizes over all usable records, held out or not."""
        index, image, audio = self.index, self._records.image, self._records.audio
        media = {image: index.images[:, 1:], audio: index.recordings[:, None]}
        ends = {image: index.image_ends, audio: index.recording_ends}
        for number, name in enumerate(self._records.generators):
            is_made = index.targets[:, 0] == number
            axes = self._records.encoders[name].axes
            media[name], ends[name] = index.targets[is_made, 1 : 1 + axes], np.cumsum([0, *is_made])[index.target_ends]
        specs = {name: spec for name, spec in self._records.encoders.items() if len(media[name])}
        grids = {name: np.stack(spec.grid(*media[name].T), axis=1) for name, spec in specs.items()}
        patches = {name: np.prod(grid, axis=1) for name, grid in grids.items()}
        for number, name in enumerate(self._records.generators):
            if name in specs and specs[name].references:
                patches[name] = patches[name] + self._reference_patches(specs[name])[index.targets[:, 0] == number]
        return WorstCase(
            tokens=int(index.tokens.max()),
            media={name: int(np.diff(ends[name], prepend=0).max()) for name in specs},
            patches={name: int(counts.max()) for name, counts in patches.items()},
            sides={name: int(grid.max()) for name, grid in grids.items()},
            least={name: int(counts.min()) for name, counts in patches.items()},
        )

    def _reference_patches(self, spec: EncoderSpec) -> np.ndarray:
        """Patches of the pictures from which each picture to be made is made, int64, beside `Index.targets`."""
        index = self.index
        records = np.searchsorted(index.reference_ends, np.arange(len(index.references)), side="right")
        before = np.concatenate([[0], index.target_ends])[records]
        counts = np.prod(index.references[:, 2:] // spec.patch, axis=1)
        return np.bincount(before + index.references[:, 0], counts, len(index.targets)).astype(np.int64)

    # ---- from the index ----------------------------------------------------------------------------------------------

    def _sizes(self, number: int) -> dict[str, list[tuple[int, ...]]]:
        """Sizes of the media of a record by encoder or generator; one without media is left out."""
        images = [size for media in self.index.sizes(number) for size in media]
        recordings = [(frames,) for frames in self.index.frames(number)]
        targets = self._targets(number)
        by_encoder = {self._records.image: images, self._records.audio: recordings, **targets.by_generator}
        return {name: list(sizes) for name, sizes in by_encoder.items() if sizes}

    def _targets(self, number: int) -> Targets:
        """The sizes of a record's pictures to be made."""
        targets = self.index.targets_of(number)
        makers = tuple(self._records.generators[generator] for generator, _ in targets)
        axes = [self._records.encoders[maker].axes for maker in makers]
        sizes = tuple(size[:count] for (_, size), count in zip(targets, axes, strict=True))
        return Targets(makers=makers, sizes=sizes, references=self.index.references_of(number))

    def _images(self, number: int) -> list[Measure]:
        """The sizes of a record's images and videos."""
        return list(map(Measure, self.index.upright(number), self.index.sizes(number), self.index.clips_of(number)))

    def _prompt_media(self, number: int, dialogue: EncodedDialogue) -> dict[str, int]:
        """Number of media before the last answer, by encoder."""
        image = self._records.image
        images = self.index.sizes(number)[: dialogue.before.get(image, 0)]
        counts = {**dialogue.before, image: sum(map(len, images))}
        return {name: counts.get(name, 0) for name in self._sizes(number)}

    def _blank(self, number: int) -> EncodedDialogue:
        length = int(self.index.tokens[number])
        return self._records.blank(self._images(number), self.index.frames(number), self._targets(number), length)

    def _tiled(self, number: int) -> dict[str, tuple[Tiled, ...]]:
        """How each image of a record was cut; nothing if the LLM takes the encoder's media one by one."""
        pictures = self._records.pictures
        if not pictures or not pictures.spec.newline:
            return {}
        return {self._records.image: tuple(map(pictures.tiled, self._images(number)))}

    def _video_times(self, number: int) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Numbers along time of each image and video of a record, where times are positions."""
        clips, videos = self.index.clips_of(number), self._records.videos
        if self.config.video != "positions" or not any(clips):
            return {}
        assert videos
        return {self._records.image: tuple(videos.numbers(clip) if clip else () for clip in clips)}

    # ---- from the record ---------------------------------------------------------------------------------------------

    def _texts(self, tokenized: TokenizedRecord | None) -> tuple[str, str]:
        """The last question and its answer."""
        if tokenized is None:
            return "", ""
        turns, format_text = tokenized.record.dialogue, self._records.template.formatted
        answer = "" if is_prompt(turns) else tokenized.dialogue.answer or turns[last_answer(turns)].text
        if tokenized.record.targets:  # no text that the model says stands for a picture
            answer = answer.replace(DRAWING, "").replace(MEDIUM, "")
        return format_text(without_literals(last_question(turns))), format_text(without_literals(answer))

    def _tokenized(self, number: int, faults: list[Fault]) -> TokenizedRecord | None:
        """The record as tokens, no medium opened; None, and a fault in `faults`, if it differs from the index."""
        index = self.index
        with self._noting(faults, number):
            record = self._records.heard(self.reader.read(tuple(index.places[number].tolist())))
            shortened = cut(record, int(index.turns[number]))
            images, recordings, targets = self._images(number), index.frames(number), self._targets(number)
            counts = len(shortened.images), len(shortened.recordings), len(shortened.targets)
            if counts == (len(images), len(recordings), len(targets.sizes)):
                alone = len(record.images) == 1
                tokenized = self._records.tokenize(shortened, images, recordings, targets=targets, alone=alone)
                weight = loss_weight(np.asarray(tokenized.dialogue.weights, np.float32))
                if (len(tokenized.dialogue.tokens), weight) == (index.tokens[number], index.weights[number]):
                    return tokenized
            raise Unusable(_CHANGED, record=record.id)
        return None

    def _media(
        self, name: str, number: int, tokenized: TokenizedRecord | None, faults: list[Fault]
    ) -> tuple[np.ndarray, ...]:
        """The media of an encoder. Unreadable media are blank; the reasons are added to `faults`."""
        encoded = tokenized.encoded(name, self._records) if tokenized else ()
        if name == self._records.image:
            measures: list[Measure | None] = [*self._images(number)]
            sizes_of_files: list[list[Any]] = [*self.index.sizes(number)]
        else:
            sizes_of_files = [[size] for size in self._sizes(number)[name]]
            measures = [None] * len(sizes_of_files)
        media: list[np.ndarray] = []
        for at, (sizes, measure) in enumerate(zip(sizes_of_files, measures, strict=True)):
            spec = self._records.encoders[name]
            arrays = [blank_medium(spec, size, spec.frames if measure and measure.clip else 1) for size in sizes]
            if tokenized and encoded:
                record = tokenized.record.id
                with self._noting(faults, number, record), self._records.naming(encoded[at], name, at):
                    decoded = self._records.decode(name, encoded[at], measure, alone=tokenized.alone)
                    if [medium.shape for medium in decoded] != [blank.shape for blank in arrays]:
                        raise Unusable(_CHANGED)
                    arrays = decoded
            media += arrays
        return tuple(media)

    def _references(
        self, number: int, tried: Collection[str], tokenized: TokenizedRecord | None, faults: list[Fault]
    ) -> dict[str, tuple[tuple[np.ndarray, ...], ...]]:
        """The pictures that a record's pictures are made from, by generator; as `_media`, which it goes with."""
        targets = self._targets(number)
        pictures: dict[str, list[tuple[np.ndarray, ...]]] = {
            name: [] for name in targets.reference_sizes if name in tried
        }
        for name, references in zip(targets.makers, targets.references, strict=bool(targets.references)):
            if name not in pictures:
                continue
            spec = self._records.encoders[name]
            single = spec if spec.pictures else replace(spec, latents="")  # of latents made ahead the means
            opened = [blank_medium(single, size) for _, size in references]
            for at, (image, _) in enumerate(references):
                if tokenized:
                    medium, record = tokenized.record.images[image], tokenized.record.id
                    with self._noting(faults, number, record), self._records.naming(medium, self._records.image, image):
                        opened[at] = self._read_reference(name, medium, opened[at])
            pictures[name].append(tuple(opened))
        return {name: tuple(of_maker) for name, of_maker in pictures.items()}

    def _hand_over(
        self,
        name: str,
        number: int,
        opened: dict[str, tuple[np.ndarray, ...]],
        references: dict[str, tuple[tuple[np.ndarray, ...], ...]],
    ) -> None:
        """Gives the pictures of a generator whose latents are made in the step to their encoder.

        The generator gets distributions in their place, of which the latents' noise is drawn, and blank references.
        """
        spec, sizes = self._records.encoders[name], self._sizes(number)[name]
        behind = references.get(name) or ((),) * len(sizes)
        opened[spec.encoder] = tuple(
            picture for medium, pictures in zip(opened[name], behind, strict=True) for picture in (medium, *pictures)
        )
        opened[name] = tuple(unit_distribution(spec, size) for size in sizes)
        if name in references:
            references[name] = tuple(
                tuple(np.zeros((*(side // spec.factor for side in p.shape[:2]), spec.channels), np.float32) for p in of)
                for of in behind
            )

    def _read_reference(self, name: str, medium: Media, blank: np.ndarray) -> np.ndarray:
        """An image as the generator `name` sees it, of the shape of `blank`. Raises Unusable for another one."""
        picture, spec = self._records.reference(name, medium), self._records.encoders[name]
        if spec.latents != BLANK and picture.shape != blank.shape:
            raise Unusable(_CHANGED)
        return picture

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
