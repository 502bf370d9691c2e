"""The token of the server that `benchmarks.api` measures."""

TOKEN = "of-a-benchmark-on-loopback-" + "0" * 16
