"""The sides of `benchmarks.elastic`: both go through the same changes of an elastic world."""
