"""Writes dialogues about images in each layout that mmjax reads, to convert data and to try the layouts."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """A dialogue about images.

    turns: questions and answers; `<image>` marks an image's place. images: suffix ("png") and encoded bytes of each.
    """

    turns: tuple[tuple[str, str], ...]
    images: tuple[tuple[str, bytes], ...] = ()

    def conversations(self) -> list[dict[str, str]]:
        """The turns in LLaVA's layout: {"from": "human" or "gpt", "value": text} for each question and each answer."""
        pairs = [(("human", question), ("gpt", answer)) for question, answer in self.turns]
        return [{"from": speaker, "value": text} for pair in pairs for speaker, text in pair]


def write_llava(folder: Path, dialogues: Sequence[Dialogue]) -> Path:
    """Writes `folder`/data.json, and images into `folder`/images; returns the path of the JSON file.

    dialogues: such as [Dialogue(turns=(("<image> what is it?", "a cat"),), images=(("png", png_bytes),))].
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, dialogue in enumerate(dialogues):
        names = [f"images/{number:06}_{at}.{suffix}" for at, (suffix, _) in enumerate(dialogue.images)]
        for name, (_, data) in zip(names, dialogue.images, strict=True):
            (folder / name).write_bytes(data)
        row: dict[str, Any] = {"id": f"{number:06}", "conversations": dialogue.conversations()}
        # LLaVA has one name for one image, none for none, and a list for several.
        rows.append(row | ({"image": names[0] if len(names) == 1 else names} if names else {}))
    path = folder / "data.json"
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


def write_webdataset(folder: Path, dialogues: Sequence[Dialogue], per_shard: int) -> Path:
    """Writes shards of `per_shard` samples, `folder`/00000.tar and so on; returns their pattern, `folder`/*.tar.

    dialogues: such as [Dialogue(turns=(("<image> what is it?", "a cat"),), images=(("png", png_bytes),))].
    """
    folder.mkdir(parents=True, exist_ok=True)
    for shard, first in enumerate(range(0, len(dialogues), per_shard)):
        with tarfile.open(folder / f"{shard:05}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, dialogue in enumerate(dialogues[first : first + per_shard], first):
                _add(tar, f"{number:06}", dialogue)
    return folder / "*.tar"


def write_array_record(path: Path, dialogues: Sequence[Dialogue]) -> Path:
    """Writes one file, whose records are tars of the members that a WebDataset sample has; returns `path`.

    dialogues: such as [Dialogue(turns=(("<image> what is it?", "a cat"),), images=(("png", png_bytes),))].
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for number, dialogue in enumerate(dialogues):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            _add(tar, f"{number:06}", dialogue)
        writer.write(file.getvalue())
    writer.close()
    return path


def write_parquet(path: Path, dialogues: Sequence[Dialogue], per_group: int = 100) -> Path:
    """Writes one table, in groups of `per_group` rows (a row is read with its group); returns `path`.

    The columns are "conversations" and "images".

    dialogues: such as [Dialogue(turns=(("<image> what is it?", "a cat"),), images=(("png", png_bytes),))].
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    turn = pa.struct([("from", pa.string()), ("value", pa.string())])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("conversations", pa.list_(turn)), ("images", pa.list_(image))])
    rows = [
        {
            "conversations": dialogue.conversations(),
            "images": [{"bytes": data, "path": f"{at}.{suffix}"} for at, (suffix, data) in enumerate(dialogue.images)],
        }
        for dialogue in dialogues
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=per_group)
    return path


def write_pictures(folder: Path, dialogues: Sequence[Dialogue]) -> Path:
    """Writes the first image of each dialogue into `folder`, with its first answer as the caption beside it.

    Returns `folder`, a source of kind "pictures". A dialogue without images is left out.

    dialogues: such as [Dialogue(turns=(("<image> what is it?", "a cat"),), images=(("png", png_bytes),))].
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, dialogue in enumerate(dialogues):
        for suffix, data in dialogue.images[:1]:
            (folder / f"{number:06}.{suffix}").write_bytes(data)
            (folder / f"{number:06}.txt").write_text(dialogue.turns[0][1], encoding="utf-8")
    return folder


def write_all(folder: Path, dialogues: Sequence[Dialogue], per_shard: int = 100) -> dict[str, Path]:
    """Writes every layout into `folder`; returns the value for `Source.path`, by `Source.kind`.

    The kinds are "llava", "webdataset" (in shards of `per_shard` samples), "array_record" and "parquet".

    dialogues: such as [Dialogue(turns=(("<image> what is it?", "a cat"),), images=(("png", png_bytes),))].
    """
    return {
        "llava": write_llava(folder / "llava", dialogues),
        "webdataset": write_webdataset(folder / "webdataset", dialogues, per_shard),
        "array_record": write_array_record(folder / "data.array_record", dialogues),
        "parquet": write_parquet(folder / "data.parquet", dialogues),
    }


def _add(tar: tarfile.TarFile, key: str, dialogue: Dialogue) -> None:
    files = [(f"{key}.{at}.{suffix}", data) for at, (suffix, data) in enumerate(dialogue.images)]
    files.append((f"{key}.json", json.dumps({"conversations": dialogue.conversations()}).encode()))
    for name, data in files:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
