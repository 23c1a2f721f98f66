"""Turns videos into media of an image encoder: one for each temporal patch, some frames one behind the other.

`Videos.measure` plans a video's media from its header. `Videos.media` decodes the frames that are taken and resizes
each at once, so that memory holds one frame of the file's size, however many there are.
"""

from __future__ import annotations

import numpy as np

from mmjax.configurable import require
from mmjax.data.sources.clips import Clip, frame_size, padded, seconds_of, taken_frames, time_numbers
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.frame_resizing import resize_frame
from mmjax.data.sources.images import Measure
from mmjax.data.sources.media import Media
from mmjax.data.sources.sizes import Size
from mmjax.data.sources.storage import Unusable
from mmjax.data.sources.video_files import open_video
from mmjax.data.types import EncoderSpec


class Videos:
    """Makes media of a source's videos for an image encoder.

    Args:
      name: the source's name, for messages.
      config: the source, whose settings decide which frames are taken and how they are resized.
      spec: the encoder's spec, with `frames` of a temporal patch.

    Raises:
      ConfigError: the settings do not fit the encoder.
    """

    def __init__(self, name: str, config: SourceConfig, spec: EncoderSpec):
        self.config, self.spec = config, spec
        fix = "frames are of 3 channels; set it to '', or ViT.channels to 3"
        require(spec.channels == 3 or not config.video, f"{name}/Source.video", config.video, fix)

    def require_taken(self, encoder: str) -> None:
        """Raises Unusable unless the encoder and the source take videos; `encoder` is its name in the message."""
        if self.spec.frames == 1:
            fix = "name an encoder whose patches have 2 frames, or give frames as images"
            raise Unusable(f"it has a video, and {encoder} has patches of a single frame; {fix}")
        if not self.config.video:
            fix = "set it to 'timestamps' if the model reads times between frames, to 'positions' if they are positions"
            raise Unusable(f"it has a video, and Source.video='' takes none; {fix}")

    def measure(self, media: Media) -> Measure:
        """The size of a video's frames, and of the media that it becomes, from its header. See `open_video` for errors.

        Raises Unusable for a video with fewer frames than a temporal patch has.
        """
        with open_video(media, self.config) as video:
            size, clip = video.size(), video.clip()
            if clip.frames < self.spec.frames:
                shown = f"{clip.frames} frame{'s' * (clip.frames != 1)}"
                raise Unusable(
                    f"a video of {shown}: the encoder's patches have {self.spec.frames}; give it as an image"
                )
            if self.config.frames and self.config.frames > clip.frames:
                raise Unusable(f"a video of {clip.frames} frames; Source.frames is {self.config.frames}")
        return Measure(size, self.sizes(clip, size), clip)

    def sizes(self, clip: Clip, size: Size) -> list[Size]:
        """The size of each temporal patch of a video. size: height and width of its frames."""
        count = len(taken_frames(clip, self.config, self.spec.frames))
        resized = self._frame_size(count, size)
        return [resized] * -(-count // self.spec.frames)

    def seconds(self, clip: Clip) -> tuple[float, ...]:
        """The time of each temporal patch of a video as text has it; () where times are positions."""
        return seconds_of(clip, self.config, self.spec.frames) if self.config.video == "timestamps" else ()

    def numbers(self, clip: Clip) -> tuple[int, ...]:
        """The number of each temporal patch of a video along time, from 0, where times are positions."""
        return time_numbers(clip, self.config, self.spec.frames)

    def media(self, media: Media, measure: Measure) -> list[np.ndarray]:
        """The temporal patches of a video, float32 [h, w, frames * 3], with the sizes that `measure` has.

        Raises Unusable if it cannot be decoded, or is another video now.
        """
        assert measure.clip
        numbers = taken_frames(measure.clip, self.config, self.spec.frames)
        size = self._frame_size(len(numbers), measure.original)
        with open_video(media, self.config) as video:
            if video.size() != measure.original:
                raise Unusable("it is not what it was when it was indexed")
            resized = [resize_frame(frame, size, self.config.resample) for frame in video.frames(numbers)]
        places, frames = padded(range(len(resized)), self.spec.frames), self.spec.frames
        patches = [places[at : at + frames] for at in range(0, len(places), frames)]
        return [np.concatenate([self._normalised(resized[at]) for at in patch], axis=-1) for patch in patches]

    def _frame_size(self, count: int, size: Size) -> Size:
        try:
            return frame_size(count, size, self.config, block=self.spec.block, frames=self.spec.frames)
        except ValueError as error:
            raise Unusable(str(error)) from None

    def _normalised(self, pixels: np.ndarray) -> np.ndarray:
        values = pixels.astype(np.float32) / np.float32(255)
        if self.config.mean:
            values = (values - np.asarray(self.config.mean, np.float32)) / np.asarray(self.config.std, np.float32)
        return values
