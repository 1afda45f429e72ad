"""A PTX emulator: the kernels of fp4deploy executed instruction by instruction on a CPU; see docs/emulator.md."""

__version__ = "0.2.0"
