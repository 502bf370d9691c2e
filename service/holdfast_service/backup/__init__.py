"""Backups of the control plane: its database and keys in one file, for either kind of database.

A backup is complete under its name or does not exist. A restore changes nothing before the whole
file is verified, and fills the database in one transaction.
"""
