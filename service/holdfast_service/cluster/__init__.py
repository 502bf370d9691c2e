"""All that is Ray: actors, placement groups, names. Nothing here takes a decision."""
