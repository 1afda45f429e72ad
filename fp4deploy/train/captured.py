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

Batch = tuple[torch.Tensor, ...]
LAUNCHED_FIRST = 4
ROOM = 2.2  # times the memory of a step: the graph, a launched step, and what the allocator cuts off


class CapturedStep:
    """Runs a step of a batch of tensors: captured once, then replayed."""

    def __init__(self, step: Callable[..., None], abandon: Callable[[], None], refusal: str | None = None) -> None:
        """`abandon` forgets what a capture that failed left behind; `refusal`: why there is none in this training."""
        self._step, self._abandon, self.refusal = step, abandon, refusal
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
        elif self._launched < LAUNCHED_FIRST:
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
        if self._launched < LAUNCHED_FIRST:
            self._step(*batch)
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._step(*batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for each in caught:
            if "synchronizing CUDA operation" in str(each.message):
                self.refusal = f"{each.filename}, line {each.lineno} waits for the GPU"
            elif "Synchronization debug mode is a prototype" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

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
        """Record a step without running it; the loader's threads may go on calling CUDA meanwhile."""
        torch.cuda.empty_cache()
        needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        if torch.cuda.mem_get_info()[0] < ROOM * needed:
            self.refusal = "the GPU has no room for a graph beside launched steps"
            return
        buffers, graph = tuple(each.clone() for each in batch), torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),  # again after a capture that fails
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                self._step(*buffers)
        except Exception as error:  # whatever the network calls
            lines = str(error).strip().splitlines() or [""]
            self.refusal = f"the step cannot be captured ({type(error).__name__}: {lines[0][:200]})"
            self._abandon()
            return
        self._graph, self._batch = graph, buffers
