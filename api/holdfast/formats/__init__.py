"""Files that cross the API: YAML documents, code archives, exported metric series."""
