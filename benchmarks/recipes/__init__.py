"""Training programs that benchmarks run: hangs, storms, checked state, a large state."""
