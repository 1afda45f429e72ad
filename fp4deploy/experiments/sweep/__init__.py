"""Sweeps: variants of a configuration over seeds, from shared FP16 models."""
