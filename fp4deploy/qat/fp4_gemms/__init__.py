"""The three GEMMs of a training step on packed FP4 operands: forward, input gradient (dgrad), weight gradient (wgrad).

`operands` packs, `reference` multiplies in plain torch, `autograd` is what a quantised layer calls, `requirements` says
which recipes can. `backward_gemms` in the room above is the emulation: the same codes, dequantised before they are
multiplied.
"""
