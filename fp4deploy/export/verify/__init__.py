"""Comparing what is exported with torch, before it is written.

| module | what it compares |
|---|---|
| `outputs` | the decomposed graph and torch end to end, on validation images; the limits |
| `layerwise` | the decomposed graph layer by layer, with reference inputs from torch |
| `packed` | a packed network and torch, end to end and node by node |
| `last_bits` | what torch's own last bits decide about, which no comparison can |
| `sizes` | files of open size at two other sizes; `first_difference`: the operator from which on they differ |
"""
