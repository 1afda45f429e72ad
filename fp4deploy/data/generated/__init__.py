"""Generated scenes in COCO's format, for demos and tests."""
