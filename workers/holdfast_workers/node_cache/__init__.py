"""Files and folders in the cache of a node: built once, locked by the processes that use them, and
removed when none does.
"""
