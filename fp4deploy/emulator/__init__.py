"""A PTX emulator: the kernels executed instruction by instruction on a CPU; see docs/emulator.md."""
