"""Inputs that are wrong in every way that could be thought of, drawn from a seeded generator."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from data_sources import encoded, pixels, recorded

GOOD = {
    "image": "good.png",
    "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "good"}],
}
Rng = np.random.Generator


def good_image() -> bytes:
    """A small image that can be read."""
    return encoded(pixels(16, 16, 5))


def cut(data: bytes, rng: Rng, least: int = 1) -> bytes:
    """A true beginning of `data`, without its second half at the least."""
    return data[: int(rng.integers(least, max(least + 1, len(data) // 2)))]


def garbage(rng: Rng, most: int = 2000) -> bytes:
    """Random bytes."""
    return rng.bytes(int(rng.integers(1, most)))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(rng: Rng) -> bytes:
    """A few bytes that say they are up to four thousand million pixels; or, now and then, not so few that are many."""
    if rng.random() < 0.02:
        return encoded(np.zeros((9000, 9000), np.uint8), "PNG")
    side = int(rng.integers(8000, 65000))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def text_bomb(rng: Rng) -> bytes:
    """A PNG with a compressed comment of 10 MB or more before its pixels, which then are cut off."""
    comment = b"comment\0\0" + zlib.compress(bytes(10**8 if rng.random() < 0.02 else 10**7), 1)
    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"zTXt", comment) + _chunk(b"IEND", b"")


def flipped_head(rng: Rng) -> bytes:
    """A JPEG or a WebP without its first marks."""
    data = bytearray(encoded(pixels(24, 24), ("JPEG", "WEBP")[int(rng.integers(2))]))
    data[:16] = rng.bytes(16)
    return bytes(data)


_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM")
BAD_IMAGES: dict[str, Callable[[Rng], bytes]] = {
    "zero-length": lambda rng: b"",
    "truncated png": lambda rng: cut(encoded(pixels(40, 40)), rng),
    "truncated jpeg": lambda rng: cut(encoded(pixels(90, 90), "JPEG"), rng),
    "truncated webp": lambda rng: cut(encoded(pixels(40, 40), "WEBP"), rng),
    "garbage": garbage,
    "garbage after a mark": lambda rng: _BEGINNINGS[rng.integers(4)] + garbage(rng),
    "bomb": png_bomb,
    "text bomb": text_bomb,
    "no head": flipped_head,
    "text": lambda rng: b"<html>404 Not Found</html>",
    "a recording": lambda rng: recorded(np.zeros(300)),
    "a zip": lambda rng: b"PK\x03\x04" + garbage(rng),
    "a pickle": lambda rng: b"\x80\x04\x95" + garbage(rng),
    "an empty image": lambda rng: _BEGINNINGS[0] + _chunk(b"IHDR", bytes(8) + b"\x08\x02\0\0\0") + _chunk(b"IEND", b""),
}  # fmt: skip

NAMES = ("../good.png", "/etc/passwd", "a/../../b.png", "http://127.0.0.1/x.png", "file:///etc/passwd", "", "none.png")
NAMES = (*NAMES, "a\0b.png", "n" * 5000, "folder", "..", ".", "good.png/x", "\\\\host\\x.png", "memory://x")
_VALUES = (None, 1, 1.5, True, [], {}, [[]], "", "x" * 10, {"bytes": 3}, [None], -(10**30))


def bad_line(rng: Rng) -> bytes:
    """A line of JSON Lines that is no record."""
    kind = int(rng.integers(9))
    good_json = json.dumps(GOOD).encode()
    if kind == 0:
        return cut(good_json, rng)
    if kind == 1:
        return b"[" * int(rng.integers(1, 100_000))
    if kind == 2:
        return rng.bytes(20).replace(b"\n", b"") + b"\xff{"
    if kind == 3:
        return json.dumps({**GOOD, "image": NAMES[rng.integers(len(NAMES))]}).encode()
    if kind == 4:
        wrong = [v for v in _VALUES if v not in (None,)]
        return json.dumps({"image": "good.png", "conversations": wrong[rng.integers(len(wrong))]}).encode()
    if kind == 5:
        turn = {"from": ("human", "gpt", "dog", 3, None)[rng.integers(5)], "value": _VALUES[rng.integers(6)]}
        return json.dumps(
            {"conversations": [turn, {"from": "gpt", "value": ""}][: int(rng.integers(1, 3))] * 2}
        ).encode()
    if kind == 6:
        return json.dumps(
            {"image": [1, {}, [[]], {"a": 1}, True][rng.integers(5)], "question": "q", "answer": "a"}
        ).encode()
    if kind == 7:
        return (
            b'{"question": "\\ud800", "answer": "a"}'
            if rng.integers(2)
            else b'{"question": "<image>", "answer": "<image>"}'
        )
    return (b"null", b"1", b'"text"', b"[]", b"{}", b"NaN", b"9" * 5000, b"\x00", b'{"a":')[rng.integers(9)]


def member(name: str, data: bytes = b"", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member of a tar."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in changes.items():
        setattr(info, field, value)
    return info, data


def tar_of(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """A tar of members, written one after the other whatever they say of themselves."""
    file = io.BytesIO()
    for info, data in members:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.write(data + bytes(-len(data) % 512))
    return file.getvalue() + bytes(1024)


def bad_tars(rng: Rng) -> Iterator[tuple[str, bytes]]:
    """Shards of which no sample can be used."""
    image = good_image()
    sample = [member("x.png", image), member("x.txt", b"caption")]
    escapes = ("../x.txt", "/x.txt", "a/../../x.txt", "..", "/", "a/..")
    yield "truncated", cut(tar_of(sample), rng, 100)
    yield "truncated in a block", tar_of(sample)[: 1536 + int(rng.integers(1, 500))]
    yield "escapes", tar_of([member(escapes[rng.integers(len(escapes))], b"text")])
    yield "escapes behind a plain name", tar_of([member("x/../../y.txt", b"text")])
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    yield "a link", tar_of([member("x.txt", type=kinds[rng.integers(5)], linkname="/etc/passwd")])
    for size in (-512, -(1 << 40), 1 << 50):
        yield f"size {size}", tar_of([member("x.txt", size=size), *sample])
    yield "a huge long name", tar_of([member("@LongLink", type=tarfile.GNUTYPE_LONGNAME, size=1 << 40)])
    yield "a long name of negative size", tar_of([member("@LongLink", type=tarfile.GNUTYPE_LONGNAME, size=-1)])
    yield "pax without end", tar_of([member("p", b"0 size=-1\n", type=tarfile.XHDTYPE), member("x.txt", b"t")])
    yield (
        "pax of negative size",
        tar_of([member("p", b"15 size=-99999\n", type=tarfile.XHDTYPE), member("x.txt", b"t")]),
    )
    yield "pax of pax", tar_of([member("p", b"", type=tarfile.XHDTYPE)] * 3000)
    yield "sparse", tar_of([member("x.txt", b"t", type=tarfile.GNUTYPE_SPARSE)])
    broken = bytearray(tar_of(sample))
    broken[148:156] = b"0000000\0"
    yield "a wrong checksum", bytes(broken)
    yield "zero-length", b""
    yield "garbage", garbage(rng)
    yield "compressed", gzip.compress(tar_of(sample))
    yield "text", b"text" * int(rng.integers(1, 1000))
    yield "no text", tar_of([member("x.cls", b"3")])
    yield "bad json", tar_of([member("x.png", image), member("x.json", bad_line(rng)[:2000] + b"{")])
    yield "json that is no object", tar_of([member("x.json", b"[1]")])
    yield "text that is none", tar_of([member("x.txt", b"\xff\xfe\xfa")])
    for kind, make in BAD_IMAGES.items():
        yield f"{kind} in it", tar_of([member("x.png", make(rng)), member("x.txt", b"caption")])
    yield "a recording that is none", tar_of([member("x.wav", b"RIFF" + garbage(rng)), member("x.txt", b"caption")])
    yield (
        "a recording cut off",
        tar_of([member("x.wav", recorded(np.zeros(900))[:200]), member("x.txt", b"<recording>")]),
    )
