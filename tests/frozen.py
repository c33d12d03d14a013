"""The last module that a server of ranks imports (tests/ranks.py): collections of garbage then pass over all of them.

A collection would otherwise visit each of their objects in each rank, and copy the pages on which they lie.
"""

import gc

gc.collect()
gc.freeze()
