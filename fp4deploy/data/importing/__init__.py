"""Annotations of other tools and layouts, written as a COCO folder."""
