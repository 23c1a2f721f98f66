"""The configurable `Source`: one dataset of `Data.sources`, and how its records become samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mmjax.configurable import ConfigError, configurable, not_negative, one_of, positive, require
from mmjax.data.chat import TEMPLATES, Template
from mmjax.data.processor.template import FolderTemplate, read_template
from mmjax.user_code import CODE, names_code, replace_by_name

KINDS = ("llava", "webdataset", "array_record", "parquet", "pictures")
PROMPTS = "messages"
"""The kind of a file of prompts, which `mmjax.generate` writes."""
FOLDER = "folder"
"""The template that is the chat template of the folder in ``Data.tokenizer``."""
_READ = {
    "budget": ("max_pixels", "max_patches"),
    "fixed": ("size", "fit", "edge"),
    "anyres": ("size", "grids", "alone"),
    "smart": ("max_pixels", "min_pixels"),
    "naflex": ("max_patches",),
    "largest": ("max_patches",),
}
"""The settings that each value of `resize` reads, among the settings that not all read."""
RESIZES = tuple(_READ)
FITS = ("pad", "crop", "stretch", "square")
RESAMPLES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters in the order of Pillow's numbers, which folders contain."""
MOST_PIXELS = 89_478_485
"""Pillow warns of larger images."""
VIDEOS = ("", "timestamps", "positions")
FRAME_RESAMPLES = ("bilinear", "bicubic")
_OF_VIDEOS = (
    *("fps", "frames", "min_frames", "max_frames", "video_pixels", "frame_pixels", "time_positions", "folder_fps"),
    *("frame_limit", "video_sound"),
)
"""The settings that videos alone read."""
_CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


@configurable("Source")
@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One dataset of Data.sources.

    kind: "llava" (JSON or JSONL of dialogues, and a folder of media), "webdataset" (tar shards), "array_record",
    "parquet", "pictures" (a folder of pictures, a.txt with the caption of a.png), or "package.module:Factory" for a
    reader of your own, which needs --allow_code.
    path: local path or fsspec URL of the file or files; * and {000..012} name several.
    media: folder to which names of images, recordings and videos are relative; "" = the folder of path.
    held_out: records, evenly spread over all, that are evaluated on and never trained on; 0 evaluates on all.
    strict: whether a record that cannot be used ends the run; else it is left out and named in skipped.jsonl.
    cut: whether a dialogue that is longer than Data.sequence_length loses its last turns; else it is left out.

    template: text around the turns, "plain", "vicuna", "llama2", "chatml", or "folder" for the chat template of the
    folder in Data.tokenizer. pieces: other texts for its "system", "question" or "answer", such as
    {'question': 'Q: {text} '}. system: the system prompt.
    question: the question about an image that comes with a caption; the image comes first. Where a generator makes a
    picture of the caption, the words before it.

    resize: "budget" (keep the aspect, scale down to max_pixels and max_patches), "fixed" (every image has size),
    "anyres" (the image at size, and tiles of size of one of the grids), "smart" (sides become multiples of patch *
    merge, pixels between min_pixels and max_pixels), "naflex" (as many whole patches as max_patches allows) or
    "largest" (max_patches, small images enlarged too, then sides are rounded down to multiples of patch * merge).
    max_pixels, max_patches: the most of an image, where its size is its own; 0 = any. min_pixels: the fewest under
    "smart". size: height and width; pixels at the right and the bottom that make no whole patch are cut off.
    fit: how "fixed" reaches size: "pad" (keep the aspect), "crop" (keep it, cut the excess), "stretch" or "square"
    (pad to a square in the colour of mean first). edge: the shorter side from which "crop" and "square" cut size; 0 =
    the least that covers size.
    grids: rows and columns of tiles that "anyres" may choose. alone: whether only an image that is its dialogue's only
    one has tiles; beside others an image is padded to a square.
    mean, std: of each channel, subtracted and divided by; () = pixels stay in 0 to 1.
    resample: filter with which images are resized, such as "bicubic" or "bilinear". draft: whether large JPEGs are
    decoded at a half, a quarter or an eighth where that is enough, which is faster and changes values a little.
    rounded: whether levels of resized images are whole numbers, as Pillow makes them, or fractions too (DINOv3).
    white: whether the colour that a file calls transparent becomes white; else it stays, as alpha channels do nothing.
    pixel_limit: images with more pixels are not decoded. byte_limit: larger records and files are not read.
    max_seconds: recordings are cut to this length.

    draw: whether a generator makes the image of a caption of it, in place of an encoder that sees it.
    drawn_size: height and width of all pictures to be made, which are scaled to cover it and cut in the middle; (0, 0)
    keeps the shape of each. drawn_pixels: the most pixels of one that keeps its shape, with sides that are multiples of
    patch * merge of the generator. reference_size, reference_pixels: the same of pictures that others are made from, as
    a generator with `references` sees them; (0, 0) and 0 for those of pictures to be made.

    video: how a video stands in the text, "timestamps" (each temporal patch behind its time, as in Qwen3-VL) or
    "positions" (its temporal patches together, their times M-RoPE's first numbers, as in Qwen2-VL and Qwen2.5-VL); ""
    takes none. fps: frames a second that are taken. min_frames, max_frames: the fewest and the most of them.
    frames: the number of frames that are taken, whatever their rate; 0 = by fps.
    video_pixels: the fewest and the most pixels of all frames of a video together, under "positions" of each frame.
    frame_pixels: the most of one frame under "timestamps"; 0 = any. time_positions: positions of a second under
    "positions"; 0 = one for each temporal patch. folder_fps: the rate of the frames in a folder, which is a video too;
    0 takes no folders. frame_limit: videos with more frames in their file are not decoded.
    video_sound: whether the sound track of every video is a recording behind it; else of those whose part of a message
    has use_audio_in_video.
    preset: "clip" or "siglip" (mean and std), "llava15" or "llava-next" (template and resize too).
    """

    kind: str = field(default="llava", metadata=CODE)
    path: str = ""
    media: str = ""
    held_out: int = 0
    strict: bool = False
    cut: bool = False
    template: str = "plain"
    pieces: Mapping[str, str] = field(default_factory=dict, metadata={"example": {"question": "Q: {text} "}})
    system: str = ""
    question: str = ""
    resize: str = "budget"
    max_pixels: int = 0
    min_pixels: int = 0
    max_patches: int = 256
    size: tuple[int, int] = (336, 336)
    fit: str = "pad"
    edge: int = 0
    grids: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))
    alone: bool = False
    mean: tuple[float, ...] = field(default=(), metadata={"example": (0.5, 0.5, 0.5)})
    std: tuple[float, ...] = field(default=(), metadata={"example": (0.5, 0.5, 0.5)})
    resample: str = "bicubic"
    draft: bool = True
    rounded: bool = True
    white: bool = False
    pixel_limit: int = 50_000_000
    byte_limit: int = 64 << 20
    max_seconds: float = 30.0
    draw: bool = False
    drawn_size: tuple[int, int] = (0, 0)
    drawn_pixels: int = 65536
    reference_size: tuple[int, int] = (0, 0)
    reference_pixels: int = 0
    video: str = ""
    fps: float = 2.0
    frames: int = 0
    min_frames: int = 4
    max_frames: int = 768
    video_pixels: tuple[int, int] = (131_072, 786_432)
    frame_pixels: int = 0
    time_positions: float = 0.0
    folder_fps: float = 0.0
    frame_limit: int = 200_000
    video_sound: bool = False
    preset: str = ""

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "clip": _CLIP,
        "siglip": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
        "llava15": {**_CLIP, "template": "vicuna", "resize": "fixed", "size": (336, 336), "fit": "pad"},
        "llava-next": {**_CLIP, "template": "vicuna", "resize": "anyres", "size": (336, 336)},
    }

    def __post_init__(self) -> None:
        replace_by_name(self, "kind")
        if not names_code(self.kind) and self.kind != PROMPTS:
            try:
                one_of("Source.kind", self.kind, KINDS)
            except ConfigError as error:
                raise ConfigError(f"{error}, or 'package.module:Factory' of your own") from None
        one_of("Source.template", self.template, (*TEMPLATES, FOLDER))
        fix = f"a folder's template has none; name another Source.template, such as {next(iter(TEMPLATES))!r}"
        require(self.template != FOLDER or not self.pieces, "Source.pieces", self.pieces, fix)
        TEMPLATES.get(self.template, Template()).changed("Source.pieces", self.pieces)
        one_of("Source.resize", self.resize, RESIZES)
        one_of("Source.fit", self.fit, FITS)
        one_of("Source.resample", self.resample, RESAMPLES)
        for name in ("held_out", "max_pixels", "min_pixels", "max_patches", "edge"):
            not_negative(f"Source.{name}", getattr(self, name))
        for name in ("pixel_limit", "byte_limit", "max_seconds", "drawn_pixels"):
            positive(f"Source.{name}", getattr(self, name))
        fix = f"must be at most Source.max_pixels ({self.max_pixels})"
        require(not self.max_pixels or self.min_pixels <= self.max_pixels, "Source.min_pixels", self.min_pixels, fix)
        require(self.pixel_limit <= MOST_PIXELS, "Source.pixel_limit", self.pixel_limit, f"at most {MOST_PIXELS}")
        require(len(self.size) == 2 and min(self.size) > 0, "Source.size", self.size, "must be (height, width)")
        legal = bool(self.grids) and all(len(grid) == 2 and min(grid) > 0 for grid in self.grids)
        require(legal, "Source.grids", self.grids, "must be (rows, columns) pairs, such as ((1, 2), (2, 1), (2, 2))")
        fix = "must be (height, width), or (0, 0) for each picture's own"
        for name, size in (("drawn_size", self.drawn_size), ("reference_size", self.reference_size)):
            legal = len(size) == 2 and (min(size) > 0 or not any(size))
            require(legal, f"Source.{name}", size, fix)
        not_negative("Source.reference_pixels", self.reference_pixels)
        self._check_video()
        fix = f"must have as many values as Source.mean ({len(self.mean)}), all above 0"
        require(len(self.std) == len(self.mean) and all(s > 0 for s in self.std), "Source.std", self.std, fix)

    def _check_video(self) -> None:
        one_of("Source.video", self.video, VIDEOS)
        for name in ("fps", "max_frames", "frame_limit"):
            positive(f"Source.{name}", getattr(self, name))
        for name in ("min_frames", "frame_pixels", "time_positions", "folder_fps"):
            not_negative(f"Source.{name}", getattr(self, name))
        fix = "must be 0, or 2 or more: the frames of a temporal patch"
        require(self.frames == 0 or self.frames >= 2, "Source.frames", self.frames, fix)
        fix = f"must be at least Source.min_frames ({self.min_frames}) and 2"
        require(self.max_frames >= max(2, self.min_frames), "Source.max_frames", self.max_frames, fix)
        legal = len(self.video_pixels) == 2 and 0 < self.video_pixels[0] <= self.video_pixels[1]
        require(legal, "Source.video_pixels", self.video_pixels, "must be (fewest, most), such as (131072, 786432)")
        if self.video:
            fix = f"frames are resized with {' or '.join(FRAME_RESAMPLES)}; name one, or set Source.video to ''"
            require(self.resample in FRAME_RESAMPLES, "Source.resample", self.resample, fix)

    def check_template(self, name: str, tokenizer: str) -> None:
        """Raises ConfigError if the dataset `name` has a folder's template and `Data.tokenizer` names no folder."""
        fix = "Data.tokenizer='' names no folder with a chat template; set it, or name a template, such as 'chatml'"
        require(self.template != FOLDER or bool(tokenizer), f"{name}/Source.template", self.template, fix)

    def idle(self) -> dict[str, str]:
        """The settings without effect, given the others: the reason by name, such as "edge"."""
        read = set(_READ[self.resize]) - ({"edge"} if self.fit not in ("crop", "square") else set())
        names = {name for fields in _READ.values() for name in fields}
        limits = {
            name for name in ("max_pixels", "min_pixels", "max_patches") if not getattr(self, name)
        }  # 0: no limit
        unread = {name: f"Source.resize={self.resize!r} does not read it" for name in names - read - limits}
        sized = f"Source.drawn_size={self.drawn_size} decides the size"
        unread |= {"drawn_pixels": sized} if any(self.drawn_size) else {}
        sized = f"Source.reference_size={self.reference_size} decides the size"
        unread |= {"reference_pixels": sized} if any(self.reference_size) else {}
        return unread | self._idle_of_videos()

    def _idle_of_videos(self) -> dict[str, str]:
        if not self.video:
            return dict.fromkeys(_OF_VIDEOS, "Source.video='' takes no videos")
        by_number = f"Source.frames={self.frames} decides the number of frames"
        unread = dict.fromkeys(("fps", "min_frames", "max_frames"), by_number) if self.frames else {}
        other = "frame_pixels" if self.video == "positions" else "time_positions"
        return unread | {other: f"Source.video={self.video!r} does not read it"}

    def check_axes(self, name: str, grid_setting: str) -> None:
        """Raises ConfigError if times of the dataset's videos are positions, and the LLM counts none.

        Args:
          name: the dataset's name.
          grid_setting: the LLM's field that counts rows and columns of an image, such as "rope_sections"; "" = none.
        """
        fix = "the LLM's positions have no axis of time; set Decoder.rope_sections, or name another way"
        require(bool(grid_setting) or self.video != "positions", f"{name}/Source.video", self.video, fix)

    def chat(self, tokenizer: str) -> Template | FolderTemplate:
        """The template, with `pieces` in place of its own. Raises ConfigError if a folder's template cannot be read.

        tokenizer: the value of `Data.tokenizer`, where a folder's template is.
        """
        if self.template == FOLDER:
            return read_template(tokenizer)
        return TEMPLATES[self.template].changed("Source.pieces", self.pieces)
