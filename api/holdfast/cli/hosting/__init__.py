"""The commands that run Holdfast itself on this machine: server, Ray cluster and backups."""
