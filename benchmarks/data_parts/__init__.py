"""The parts of `benchmarks.data`: the corpus, and what is measured with it.

What an interpreter of a peer runs imports nothing of Holdfast: `reader`, `read_loop`, `windows`,
`arrow_side`, `mosaic_side`.
"""
