"""The parts of `benchmarks.data`: the corpus, and what is measured with it.

What a peer's interpreter runs (`reader`, `read_loop`, `arrow_side`, `mosaic_side`, `windows`) imports
nothing of Holdfast.
"""
