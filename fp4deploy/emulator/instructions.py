"""Importing this module registers every instruction that the emulator implements."""

from fp4deploy.emulator import arithmetic, bulk, control, conversion, copies, data, matrix, tensor_memory, warpgroup

FAMILIES = (arithmetic, bulk, control, conversion, copies, data, matrix, tensor_memory, warpgroup)
