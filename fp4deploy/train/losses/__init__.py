"""Losses of the tasks, and the auxiliary losses of quantisation-aware training."""
