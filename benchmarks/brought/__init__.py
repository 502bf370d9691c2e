"""The programs that `benchmarks.bring` runs on both sides."""
