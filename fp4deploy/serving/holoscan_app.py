"""Frames of a video to class maps on the screen, with the Holoscan SDK: python segment.py VIDEO_FOLDER VIDEO_NAME

The folder beside this file has `segment.yaml`, the parameters of the operators, and the engine that it names. The video
is in the SDK's own format (`convert_video_to_gxf_entities.py` of the SDK writes it).
"""

import sys
from pathlib import Path

from holoscan.core import Application
from holoscan.operators import (
    FormatConverterOp,
    HolovizOp,
    InferenceOp,
    SegmentationPostprocessorOp,
    VideoStreamReplayerOp,
)
from holoscan.resources import UnboundedAllocator

HERE = Path(__file__).resolve().parent


class Segment(Application):
    """replayer -> resized FP32 frame -> network -> class of each pixel -> picture"""

    def __init__(self, folder: str, name: str) -> None:
        super().__init__()
        self.folder, self.video = folder, name

    def compose(self) -> None:
        """Connect the operators."""
        pool = UnboundedAllocator(self, name="pool")
        given = self.kwargs("inference")
        given["model_path_map"] = {key: str(HERE / file) for key, file in given["model_path_map"].items()}
        source = VideoStreamReplayerOp(self, name="source", directory=self.folder, basename=self.video, repeat=True)
        frame = FormatConverterOp(self, name="frame", pool=pool, **self.kwargs("frame"))
        network = InferenceOp(self, name="network", allocator=pool, **given)
        classes = SegmentationPostprocessorOp(self, name="classes", allocator=pool, **self.kwargs("classes"))
        screen = HolovizOp(self, name="screen", **self.kwargs("screen"))
        self.add_flow(source, screen, {("output", "receivers")})
        self.add_flow(source, frame)
        self.add_flow(frame, network, {("", "receivers")})
        self.add_flow(network, classes, {("transmitter", "")})
        self.add_flow(classes, screen, {("", "receivers")})


if __name__ == "__main__":
    app = Segment(*sys.argv[1:3])
    app.config(str(HERE / "segment.yaml"))
    app.run()
