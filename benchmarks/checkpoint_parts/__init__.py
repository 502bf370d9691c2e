"""What `benchmarks.checkpoint` measures of memory checkpoints, a part in each module: saves, memory
checkpoints of programs (`tier`), restores from a partner and resharding; each beside torch or the
machine's floor, in processes of `tests.support.programs.tier_worlds`."""
