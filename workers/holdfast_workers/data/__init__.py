"""Training data: texts, images and token sets as mapped files, and the order of their samples.

The sample order is a pure function of (seed, epoch, position), independent of the number of ranks.
"""
