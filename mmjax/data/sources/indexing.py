"""Makes the metadata index of a source, or opens the index that an earlier run made."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mmjax.configurable import ConfigError, require
from mmjax.data.config import DataConfig
from mmjax.data.processor.files import tokenizer_digest
from mmjax.data.sample import loss_weight
from mmjax.data.sources import index as indexes
from mmjax.data.sources import storage
from mmjax.data.sources.index import Index, Measured
from mmjax.data.sources.observer import IndexObserver
from mmjax.data.sources.record import Entry, Reader
from mmjax.data.sources.skipped import Fault, one_line
from mmjax.data.sources.storage import Unreachable
from mmjax.data.sources.tokenized import RecordTokenizer
from mmjax.data.sources.video_files import files_of

_MOST_KEYS = 12
"""The most unread keys of records that a message names."""


def index_settings(records: RecordTokenizer, data: DataConfig) -> str:
    """All that an index depends on except the contents of files, as a text of JSON; equal texts mean equal settings.

    Args:
      records: tokenizes the source's records, RecordTokenizer("mine", source_config, data, encoders, tokenizer).
      data: the data's configuration; its `tokenizer` and `new_tokens` are read.
    """
    config = records.config
    settings = {key: value for key, value in asdict(config).items() if key not in ("held_out", "preset")}
    specs = {
        name: [spec.patch, spec.merge, spec.channels, asdict(spec.log_mel) if spec.log_mel else None]
        + ([spec.most_tiles] if spec.newline else [])
        + ([spec.frames] if spec.frames > 1 else [])
        + ([spec.queries, spec.multiple, spec.canvases] if spec.drawn else [])
        + ([spec.latents] if spec.latents else [])
        + ([{"pictures": [spec.pictures.patch, spec.pictures.canvases]}] if spec.pictures else [])
        + ([{"references": spec.references}] if spec.references else [])
        for name, spec in records.encoders.items()
    }
    digest, new_tokens = tokenizer_digest(data.tokenizer), data.new_tokens
    vocabulary = [digest, *new_tokens] if new_tokens else digest
    length = 0 if config.strict else records.sequence_length
    # A relative path names another file in another working directory.
    folder = os.getcwd() if any(map(_is_relative, (config.path, config.media))) else ""
    return json.dumps(
        [indexes.FORMAT, settings, asdict(records.template), specs, vocabulary, length, folder], sort_keys=True
    )


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Makes and opens the index of one source.

    Attributes:
      name: the source's name in messages.
      reader: reads its records.
      records: tokenizes them.
      observer: receives progress and messages.
    """

    name: str
    reader: Reader
    records: RecordTokenizer
    observer: IndexObserver

    def open(self, path: Path, settings: str) -> tuple[str, Index]:
        """(digest, index) of the index at `path`. It is made if there is none for these settings and files.

        settings: the result of `index_settings`.

        Raises ConfigError if no record can be used, or one cannot although the source is strict.
        """
        if path.exists():
            try:
                head, index = indexes.read(path)
                changed = head["made_for"] != settings or not set(self._decisive_files()) <= set(index.files)
                if not changed and indexes.fingerprint(index.files) == head["files"]:
                    return head["digest"], index
                changed = "the data has changed since it was indexed; its index is made again"
                self.observer.message(f"{self.name}: {changed}")
            except (OSError, ValueError) as error:
                self.observer.message(f"{self.name}: {path} cannot be used ({error}); the index is made again")
        index = self._make()
        digest = indexes.write(path, index, settings, indexes.fingerprint(index.files))
        return digest, indexes.read(path)[1]

    def _decisive_files(self) -> list[str]:
        """The files that decide which records there are, and which of them can be used."""
        return [*self.reader.files(), *(file for maker in self.records.drawings.values() for file in maker.files)]

    def _make(self) -> Index:
        entries = list(self.reader.scan())
        faults: list[Fault] = []
        files: dict[str, None] = dict.fromkeys(self._decisive_files())
        usable: list[Measured] = []
        unread = Counter[str]()
        with self.observer.progress(len(entries), f"indexing {self.name}") as done:
            for number, entry in enumerate(entries):
                measured = self._measure(number, entry, files, unread)
                if isinstance(measured, Fault):
                    faults.append(measured)
                    if self.records.config.strict:
                        raise ConfigError(str(measured))
                else:
                    usable.append(measured)
                done(number + 1)
        self._require_usable(usable, entries, faults)
        if faults:
            count = f"{len(faults)} of {len(entries)} records"
            self.observer.message(f"{self.name}: {count} cannot be used and are left out")
        if unread:
            keys = ", ".join(f"{key!r} ({count} records)" for key, count in unread.most_common(_MOST_KEYS))
            self.observer.message(f"{self.name}: keys that are not read: {keys}{', …' * (len(unread) > _MOST_KEYS)}")
        return indexes.collect(usable, faults=faults, files=files)

    def _require_usable(self, usable: Sequence[Measured], entries: Sequence[Entry], faults: Sequence[Fault]) -> None:
        shown = f"; the first, {faults[0]}" if faults else ""
        fix = f"none of {len(entries)} records can be used{shown}" if entries else "it holds no samples"
        require(bool(usable), f"{self.name}/Source.path", self.records.config.path, fix)

    def _measure(self, number: int, entry: Entry, files: dict[str, None], unread: Counter[str]) -> Measured | Fault:
        """The entry of the index for a record, or why the record cannot be used.

        Adds the files of its media to `files`, and its unread keys to `unread`.
        """
        if entry.fault:
            return Fault(entry.name, one_line(entry.fault))
        record = None
        try:
            record = self.reader.read(entry.place)
            heard = self.records.heard(record)
            for media in (*heard.images, *heard.recordings, *heard.targets):
                if media.is_video:
                    files |= dict.fromkeys(files_of(media))
                elif media.path and not storage.is_url(media.path):
                    files[media.path] = None
            tokenized = self.records.measure(heard)
            unread.update(dict.fromkeys([*record.unread, *self.records.unread_keys(record.dialogue)], 1))
        except (ConfigError, Unreachable):
            raise
        except Exception as error:  # decoders may raise anything on broken files
            return Fault.of(entry.name, error, record.id if record else "")
        weights = np.asarray(tokenized.dialogue.weights, np.float32)
        return Measured(
            number=number,
            name=entry.name,
            place=entry.place,
            turns=len(tokenized.record.dialogue),
            tokens=len(tokenized.dialogue.tokens),
            learned=int(np.count_nonzero(tokenized.dialogue.weights)),
            weight=loss_weight(weights),
            images=tuple(tuple(image.media) for image in tokenized.images),
            originals=tuple(image.original for image in tokenized.images),
            recordings=tuple(tokenized.recordings),
            clips=tuple(image.clip or (0, 0.0) for image in tokenized.images),
            targets=self.records.numbered(tokenized.targets),
            references=self.records.numbered_references(tokenized.targets),
            key=indexes.key_of(record, self.records.config.question),
        )


def _is_relative(path: str) -> bool:
    return bool(path) and not storage.is_url(path) and not os.path.isabs(path)
