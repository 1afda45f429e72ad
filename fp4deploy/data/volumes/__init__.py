"""Volumes: NIfTI files, folders of them, resampling, and what `data check` finds."""
