"""The whole training step as one CUDA graph: forward, loss, backward, clipping, loss scaler, optimiser, amax tracking.

Launched from Python, a small network's step takes as long as its launches; replayed, as long as its kernels. The graph
reads the batch from buffers of its own and everything else (weights, moments, the learning rate, the loss scale, the
tracked amaxes, the statistics of the epoch) from tensors that keep their addresses. It launches the kernels of the step
that it was captured from, so a training has the same bits with and without it.

The first steps are launched: they create the optimiser's state, compile and choose kernels. The last of them is watched
for operations that wait for the GPU, which a graph cannot hold. A batch of another shape (the last of an epoch) and a
step that telemetry samples are launched too. Where no step can be captured, `refusal` says why.

Memory: a graph keeps the activations of its step, as long as it lives; launched steps have their own beside it. So
nothing is captured where the GPU has no room for both.

Source: CUDA programming guide, "CUDA Graphs"; torch.cuda.graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from fp4deploy.errors import named_cause

Batch = tuple[torch.Tensor, ...]
LAUNCHED_FIRST = 4
LAUNCHED_FIRST_OF_SEVERAL = 12  # DistributedDataParallel needs 11, and the last one is watched
ROOM = 2.2  # times the memory of a step: the graph, a launched step, and what the allocator cuts off


def _alone(reason: str | None) -> str | None:
    return reason


class CapturedStep:
    """Runs a step of a batch of tensors: captured once, then replayed."""

    def __init__(
        self,
        step: Callable[..., None],
        abandon: Callable[[], None],
        refusal: str | None = None,
        agree: Callable[[str | None], str | None] = _alone,
        first: int = LAUNCHED_FIRST,
    ) -> None:
        """Nothing is captured yet.

        Args:
            abandon: forgets what a capture that failed left behind.
            refusal: why there is none in this training, the same in all processes.
            agree: from the reason of each process against a graph, or None, to the one that all of them have.
            first: steps that are launched before the capture.
        """
        self._step, self._abandon, self.refusal, self._agree, self._first = step, abandon, refusal, agree, first
        self._launched = 0
        self._shapes: list[torch.Size] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch | None = None

    def __call__(self, *batch: torch.Tensor, launch: bool = False) -> None:
        """One step on this batch; `launch`: not by the graph."""
        shapes = [each.shape for each in batch]
        self._shapes = self._shapes or shapes
        if self.refusal is not None or launch or shapes != self._shapes:
            self._step(*batch)
        elif self._launched < self._first:
            self._launched += 1
            self._launch(*batch)
        else:
            self._replay(*batch)

    def release(self) -> None:
        """Free the graph and its memory."""
        self._graph = self._batch = None
        self._launched = 0

    def _launch(self, *batch: torch.Tensor) -> None:
        """A step before the capture, the last one watched."""
        if self._launched < self._first:
            self._step(*batch)
        else:
            self.refusal = self._agree(self._watch(*batch))

    def _watch(self, *batch: torch.Tensor) -> str | None:
        """A launched step; returns what in it waits for the GPU."""
        reason = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._step(*batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for each in caught:
            if "synchronizing CUDA operation" in str(each.message):
                reason = f"{each.filename}, line {each.lineno} waits for the GPU"
            elif "Synchronization debug mode is a prototype" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return reason

    def _replay(self, *batch: torch.Tensor) -> None:
        if self._graph is None or self._batch is None:
            self._capture(*batch)
        if self._graph is None or self._batch is None:
            self._step(*batch)
            return
        for buffer, given in zip(self._batch, batch, strict=True):
            buffer.copy_(given)
        self._graph.replay()

    def _capture(self, *batch: torch.Tensor) -> None:
        """Keep a graph of the step, in all processes or in none."""
        self.refusal = self._agree(self._no_room())
        if self.refusal is not None:
            return
        buffers = tuple(each.clone() for each in batch)
        graph, failure = self._record(*buffers)
        self.refusal = self._agree(failure)
        if self.refusal is None:
            self._graph, self._batch = graph, buffers
        else:
            del graph
            self._abandon()

    def _no_room(self) -> str | None:
        torch.cuda.empty_cache()
        needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        short = torch.cuda.mem_get_info()[0] < ROOM * needed
        return "the GPU has no room for a graph beside launched steps" if short else None

    def _record(self, *buffers: torch.Tensor) -> tuple[torch.cuda.CUDAGraph | None, str | None]:
        """Record a step without running it; the loader's threads may go on calling CUDA meanwhile.

        Returns:
            The graph, and why there is none.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        own = current if current != torch.cuda.default_stream() else None  # the default stream cannot be captured
        try:
            with (
                torch.cuda.stream(current),  # again after a capture that fails
                torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"),
            ):
                self._step(*buffers)
        except Exception as error:  # whatever the network calls
            return None, f"the step cannot be captured ({named_cause(error)})"
        return graph, None
