"""Corpora and the batches read from them."""
