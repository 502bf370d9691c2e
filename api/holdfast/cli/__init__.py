"""The command line: one module per group of commands, all of them through the client."""
