"""The programs that `benchmarks.bring` runs on both sides, and how each side starts them."""
