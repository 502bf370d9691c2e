"""From a detected fault to its decision: hangs, stragglers, corruption, guards, bad nodes."""
