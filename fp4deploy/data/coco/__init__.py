"""COCO annotations: the file, its regions and boxes, and a dataset of them."""
