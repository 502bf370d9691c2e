"""What users see of stored rows: pure functions from records to the API's models."""
