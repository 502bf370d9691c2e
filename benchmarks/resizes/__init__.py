"""What only `benchmarks.elastic` needs: changes, their figures, and Ray Train's elastic side."""
