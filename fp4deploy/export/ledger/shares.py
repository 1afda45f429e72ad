"""Shares of the multiply-accumulates by precision: what a network is, in one line.

    FP8 94.5 %, FP4 4.4 %, FP16 1.1 %

Counts of layers hide that: the few layers of a UNet that are a single GEMM are four of 41, and 4 % of the work.
"""

from __future__ import annotations

from collections.abc import Iterable


def shares_of(layers: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Precision -> its share of all multiply-accumulates, largest first, of (precision, multiply-accumulates).

    >>> shares_of([("FP4", 1), ("FP8", 2), ("FP4", 1), ("FP16", 0)])
    {'FP4': 0.5, 'FP8': 0.5}
    """
    counts: dict[str, int] = {}
    for precision, macs in layers:
        if macs:
            counts[precision] = counts.get(precision, 0) + macs
    total = sum(counts.values())
    return {precision: counts[precision] / total for precision in sorted(counts, key=lambda each: -counts[each])}


def in_words(shares: dict[str, float]) -> str:
    """In percent; a share below 0.05 % is named all the same, and one precision alone without a number.

    >>> in_words({"FP8": 0.9451, "FP4": 0.0548, "FP16": 0.0001})
    'FP8 94.5 %, FP4 5.5 %, FP16 < 0.1 %'
    >>> in_words({"FP16": 1.0})
    'FP16'
    """
    if len(shares) == 1:
        return next(iter(shares))
    texts = {name: f"{100 * share:.1f} %" if share >= 0.0005 else "< 0.1 %" for name, share in shares.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items())
