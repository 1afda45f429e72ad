"""The digest of a split: SHA-256 over the decoded pixels and labels of every sample, in order.

Files may be compressed again or renamed without a change of what is measured; a changed pixel, label or order gives
another digest, and so does another choice of classes.
"""

from __future__ import annotations

import hashlib

from fp4deploy.data.sample import Sample, SegmentationDataset


class DigestedDataset:
    """A dataset that notes the digest and the name of every sample it loads; implements `SegmentationDataset`.

    It works in the process that loads: not with worker processes.
    """

    def __init__(self, dataset: SegmentationDataset) -> None:
        self.class_names = dataset.class_names
        self.background = dataset.background
        self.layout = dataset.layout
        self.names: dict[int, str] = {}
        self._dataset = dataset
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def load(self, index: int) -> Sample:
        """Return the sample of the dataset."""
        sample = self._dataset.load(index)
        digest = hashlib.sha256(repr((sample.image.shape, sample.mask.shape)).encode())
        for pixels in (sample.image, sample.mask):
            digest.update(pixels.tobytes())
        self.names[index], self._digests[index] = sample.name, digest.digest()
        return sample

    def digest(self) -> str:
        """Hexadecimal digest of all samples; those that were not loaded yet are loaded now."""
        for index in range(len(self)):
            if index not in self._digests:
                self.load(index)
        whole = hashlib.sha256(repr(tuple(self.class_names)).encode())
        for index in range(len(self)):
            whole.update(self._digests[index])
        return whole.hexdigest()
