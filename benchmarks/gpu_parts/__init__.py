"""The parts of `benchmarks.gpu`. Each is a function of a `Setting` that returns figures, in a
process of its own; none needs Ray. A part raises where a promise is broken."""
