"""The metadata index of a source: the place of each record, its tokens, and the sizes of its media.

The file of an index is one line of JSON (format, settings, digest, shapes) and the bytes of the arrays. It is written
under another name and then renamed, so that no reader sees a part of it. It is used only if its digest is right, the
settings are the same, and the files of the data still have the same sizes and times.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.sources import storage
from mmjax.data.sources.clips import Clip
from mmjax.data.sources.known_records import key_of_contents, unique_keys
from mmjax.data.sources.record import Record
from mmjax.data.sources.skipped import Fault
from mmjax.data.sources.storage import Unusable
from mmjax.json_files import parse

FORMAT = "mmjax-index-10"
_HEADER_LIMIT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Strings:
    """Many strings as two arrays: UTF-8 bytes, and the end of each string in them."""

    data: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(texts: Iterable[str]) -> Strings:
        """The arrays of some texts; characters that UTF-8 cannot encode are escaped."""
        coded = [text.encode("utf-8", "backslashreplace") for text in texts]
        data = np.frombuffer(b"".join(coded), np.uint8)
        return Strings(data=data, ends=np.cumsum([len(text) for text in coded], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, at: int) -> str:
        start = int(self.ends[at - 1]) if at else 0
        return bytes(self.data[start : int(self.ends[at])]).decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))


class Measured(NamedTuple):
    """The entry of an index for one record; see `Index`.

    images: for each image or video, (height, width) of each medium that it becomes. originals: (height, width) of each.
    clips: (frames, frames a second) of each, (0, 0) for an image.
    recordings: number of frames of each.
    targets: for each picture to be made, the number of its generator, from 0, height and width.
    references: for each image that a picture is made from, the numbers of the picture and of the image, height, width.
    """

    number: int
    name: str
    place: tuple[int, ...]
    turns: int
    tokens: int
    learned: int
    weight: float
    images: tuple[tuple[tuple[int, int], ...], ...]
    originals: tuple[tuple[int, int], ...]
    recordings: tuple[int, ...]
    clips: tuple[tuple[int, float], ...]
    targets: tuple[tuple[int, int, int], ...] = ()
    references: tuple[tuple[int, int, int, int], ...] = ()
    key: int = 0


@dataclass(frozen=True, kw_only=True)
class Index:
    """Metadata of a source's N usable records, and the faults of those left out.

    Attributes:
      numbers: int64 [N], each record's number among all records.
      places: int64 [N, ·], see `Entry`.
      turns: int32 [N], number of turns after cutting.
      tokens: int32 [N], number of tokens.
      learned: int32 [N], number of tokens with a loss weight.
      weights: float64 [N], sum of the loss weights except the first token's.
      images: int32 [·, 3], for each medium made of images and videos: the image's number in its record, height, width.
      image_ends: int64 [N], the end of each record's rows in `images`.
      originals: int32 [·, 2], height and width of each image, upright and before it is resized.
      clips: float64 [·, 2], the frames of each video and their rate, beside `originals`; 0 and 0 for an image.
      original_ends: int64 [N], the end of each record's rows in `originals` and `clips`.
      recordings: int32 [·], frames of each recording.
      recording_ends: int64 [N], the end of each record's entries in `recordings`.
      targets: int32 [·, 3], for each picture to be made: the number of its generator, height, width.
      target_ends: int64 [N], the end of each record's rows in `targets`.
      references: int32 [·, 4], for each image that a picture is made from: the number of the picture among the record's
        pictures to be made, that of the image in the record, and its height and width as the generator sees it.
      reference_ends: int64 [N], the end of each record's rows in `references`.
      keys: uint64 [N], hashes by which records are recognised in changed data; see `known_records`.
      names: names of the records.
      faults: the fields of a `Fault` in turn, for each record left out.
      files: the files of the data.
    """

    numbers: np.ndarray
    places: np.ndarray
    turns: np.ndarray
    tokens: np.ndarray
    learned: np.ndarray
    weights: np.ndarray
    images: np.ndarray
    image_ends: np.ndarray
    originals: np.ndarray
    clips: np.ndarray
    original_ends: np.ndarray
    recordings: np.ndarray
    recording_ends: np.ndarray
    targets: np.ndarray
    target_ends: np.ndarray
    references: np.ndarray
    reference_ends: np.ndarray
    keys: np.ndarray
    names: Strings
    faults: Strings
    files: Strings

    def __len__(self) -> int:
        return len(self.tokens)

    def sizes(self, record: int) -> list[list[tuple[int, int]]]:
        """For each image of a record, the (height, width) of each medium that it becomes.

        record: its place among the usable records, from 0.
        """
        by_image: list[list[tuple[int, int]]] = []
        for number, height, width in self.images[_span(self.image_ends, record)].tolist():
            if number == len(by_image):
                by_image.append([])
            by_image[number].append((height, width))
        return by_image

    def upright(self, record: int) -> list[tuple[int, int]]:
        """(height, width) of each image of a record, before it is resized; `record` as in `sizes`."""
        return [(height, width) for height, width in self.originals[_span(self.original_ends, record)].tolist()]

    def clips_of(self, record: int) -> list[Clip | None]:
        """The frames of each video of a record, None for an image; `record` as in `sizes`."""
        clips = self.clips[_span(self.original_ends, record)].tolist()
        return [Clip(int(frames), rate) if frames else None for frames, rate in clips]

    def frames(self, record: int) -> list[int]:
        """Number of frames of each recording of a record; `record` as in `sizes`."""
        return self.recordings[_span(self.recording_ends, record)].tolist()

    def targets_of(self, record: int) -> list[tuple[int, tuple[int, int]]]:
        """For each of a record's pictures to be made the number of its generator, and (height, width).

        `record` as in `sizes`.
        """
        rows = self.targets[_span(self.target_ends, record)].tolist()
        return [(generator, (height, width)) for generator, height, width in rows]

    def references_of(self, record: int) -> tuple[tuple[tuple[int, tuple[int, int]], ...], ...]:
        """For each picture to be made of a record, the images that it is made from: (number, (height, width)) of each.

        () if none is made from any; `record` as in `sizes`.
        """
        rows = self.references[_span(self.reference_ends, record)].tolist()
        count = int(self.target_ends[record]) - _span(self.target_ends, record).start if rows else 0
        return tuple(
            tuple((image, (height, width)) for target, image, height, width in rows if target == number)
            for number in range(count)
        )

    @property
    def scanned(self) -> int:
        """Number of all records, with those left out."""
        return len(self) + len(self.faults) // len(Fault._fields)

    def left_out(self) -> list[Fault]:
        """The faults of the records left out, in the order of the data."""
        texts, width = list(self.faults), len(Fault._fields)
        return [Fault(*texts[at : at + width]) for at in range(0, len(texts), width)]

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array by its name in the file: "tokens", and "names.data" and "names.ends" for `Strings`."""
        by_name: dict[str, np.ndarray] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Strings):
                by_name |= {f"{field.name}.data": value.data, f"{field.name}.ends": value.ends}
            else:
                by_name[field.name] = value
        return by_name


def _span(ends: np.ndarray, at: int) -> slice:
    return slice(int(ends[at - 1]) if at else 0, int(ends[at]))


def fingerprint(files: Iterable[str]) -> str:
    """A digest of the paths, sizes and times of files, 32 hexadecimal digits; missing files count too.

    files: local paths or URLs; their order counts.
    """
    local = list(files)
    digest = hashlib.blake2b(digest_size=16)
    # Threads, since a network makes each call wait.
    with ThreadPoolExecutor(8) as pool:
        for path, stamped in zip(local, pool.map(_stamped, local, chunksize=256), strict=True):
            digest.update(f"{path}\0{stamped}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _stamped(path: str) -> str:
    try:
        size, changed = storage.stamp(path)
    except Unusable:
        return "missing"
    return f"{size}\0{changed}"


def write(path: Path, index: Index, made_for: str, stamped: str) -> str:
    """Writes an index to the file `path` and returns its digest. Raises ConfigError when it cannot be written.

    Args:
      path: the file, which is replaced; its folder is made.
      index: the index, as `collect` makes it.
      made_for: the settings as a text, as `index_settings` gives them.
      stamped: the `fingerprint` of the data's files.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in index.arrays().items()}
    digested = digest(arrays)
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    head = {"format": FORMAT, "made_for": made_for, "files": stamped, "digest": digested, "arrays": shapes}
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(json.dumps(head).encode() + b"\n")
            for array in arrays.values():
                file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return digested


def read(path: Path) -> tuple[dict[str, Any], Index]:
    """The header and the index in a file that `write` wrote; the index's arrays are mapped and read-only.

    The header is a dict: "made_for" is the text of the settings, "files" the fingerprint of the data's files and
    "digest" the digest that `write` returned. Raises ValueError, with the reason, if the file is damaged, and OSError
    if it cannot be opened.
    """
    with open(path, "rb") as file:
        line = file.readline(_HEADER_LIMIT)
        try:
            head = parse(line)
            if head["format"] != FORMAT:
                raise ValueError("it has another format")
            arrays: dict[str, np.ndarray] = {}
            at, size = len(line), os.fstat(file.fileno()).st_size
            for name, (kind, shape) in head["arrays"].items():
                dtype, count = np.dtype(kind), int(np.prod(shape, dtype=np.int64))
                if dtype.hasobject or count < 0 or at + count * dtype.itemsize > size:
                    raise ValueError("it is truncated")
                # Mapped, not read: worker processes share one copy in memory.
                mapped = np.memmap(file, np.uint8, "r", at, (count * dtype.itemsize,)) if count else b""
                arrays[name] = np.frombuffer(mapped, dtype).reshape(shape)
                at += count * dtype.itemsize
            if at != size or digest(arrays) != head["digest"]:
                raise ValueError("its checksum is wrong")
            if missing := {"made_for", "files"} - head.keys():
                raise KeyError(*missing)
            return head, _index(arrays)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its header is damaged ({type(error).__name__})") from None


def _index(arrays: dict[str, np.ndarray]) -> Index:
    values: dict[str, Any] = {}
    for field in fields(Index):
        if field.name in arrays:
            values[field.name] = arrays[field.name]
        else:
            values[field.name] = Strings(data=arrays[f"{field.name}.data"], ends=arrays[f"{field.name}.ends"])
    return Index(**values)


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """A digest of names, types, shapes and contents, in the order of `arrays` (by name): 32 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        hashed.update(f"{name} {array.dtype.str} {array.shape}".encode())
        hashed.update(np.ascontiguousarray(array).data if array.size else b"")
    return hashed.hexdigest()


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """A context for the index at `path` that one process enters at a time; others wait while it makes the index.

    Its value is None. It holds a lock on `path`.lock, beside the index. Raises ConfigError if the folder cannot be
    written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(f"{path.name}.lock"), "wb")  # noqa: SIM115
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    with lock:
        # Where a file system has no locks, several make the same index; the last one stays.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    cause = error.strerror or type(error).__name__
    return ConfigError(f"Data.cache={str(folder)!r}: cannot be written ({cause}); name another directory")


def default_cache() -> Path:
    """The folder of indexes unless `Data.cache` names another: mmjax/index in $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "mmjax" / "index"


def key_of(record: Record, question: str) -> int:
    """A hash, an int of 64 bits, of a record's contents in the data, which does not depend on settings.

    Args:
      record: the record, as `Reader.read` gives it.
      question: `Source.question`, which is left out of the hash; "" for none.
    """
    turns = [
        (turn.role, turn.text if turn.is_answer or turn.text != question else "", dict(turn.keys))
        for turn in record.dialogue
    ]
    media = [
        hashlib.blake2b(medium.data, digest_size=16).hexdigest() if medium.data is not None else medium.name
        for medium in (*record.images, *record.recordings, *record.targets)
    ]
    contents = json.dumps([record.id, record.system, turns, media], sort_keys=True, default=str)
    return key_of_contents(contents.encode())


def collect(records: Sequence[Measured], *, faults: Sequence[Fault], files: Iterable[str]) -> Index:
    """The index of measured records and of those left out; all places have the same number of integers.

    Args:
      records: the usable records in order, Measured(number=0, name="data.json[0]", place=(0,), turns=2, tokens=96, …).
      faults: the records left out, such as Fault("data.json[1]", "it has a video").
      files: the files of the data.
    """
    media = [[(n, *size) for n, image in enumerate(record.images) for size in image] for record in records]
    return Index(
        numbers=np.asarray([record.number for record in records], np.int64),
        places=np.asarray([record.place for record in records], np.int64).reshape(len(records), -1 if records else 1),
        turns=np.asarray([record.turns for record in records], np.int32),
        tokens=np.asarray([record.tokens for record in records], np.int32),
        learned=np.asarray([record.learned for record in records], np.int32),
        weights=np.asarray([record.weight for record in records], np.float64),
        images=np.asarray([medium for of_record in media for medium in of_record], np.int32).reshape(-1, 3),
        image_ends=np.cumsum([len(of_record) for of_record in media], dtype=np.int64),
        originals=np.asarray([size for record in records for size in record.originals], np.int32).reshape(-1, 2),
        clips=np.asarray([clip for record in records for clip in record.clips], np.float64).reshape(-1, 2),
        original_ends=np.cumsum([len(record.originals) for record in records], dtype=np.int64),
        recordings=np.asarray([n for record in records for n in record.recordings], np.int32),
        recording_ends=np.cumsum([len(record.recordings) for record in records], dtype=np.int64),
        targets=np.asarray([target for record in records for target in record.targets], np.int32).reshape(-1, 3),
        target_ends=np.cumsum([len(record.targets) for record in records], dtype=np.int64),
        references=np.asarray([row for record in records for row in record.references], np.int32).reshape(-1, 4),
        reference_ends=np.cumsum([len(record.references) for record in records], dtype=np.int64),
        keys=unique_keys([record.key for record in records]),
        names=Strings.of(record.name for record in records),
        faults=Strings.of(text for fault in faults for text in fault),
        files=Strings.of(files),
    )
