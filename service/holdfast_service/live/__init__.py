"""Live updates for everyone who watches: one reader of the store feeds all streams of a server."""
