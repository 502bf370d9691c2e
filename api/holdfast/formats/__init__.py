"""Files that cross the API: JSON and YAML documents, code archives, exported metric series."""
