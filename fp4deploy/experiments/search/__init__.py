"""Which layers to put in FP4 under a budget: measured errors, a solver, a recipe file.

study      error of every layer alone, mIoU of every placement that is tried; kept, so that a search can go on
costs      bytes and projected time of every layer in FP4 and in FP16
choose     the placement with the least error under a cost, or the least cost under an error
run        the search; files: its recipe, tables and picture
"""
