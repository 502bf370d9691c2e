"""Training data: texts or images as one mapped file, and the order in which samples are read.

The sample order is a pure function of (seed, epoch, position), independent of the number of ranks.
"""
