"""The remote storage of a job as the service uses it: its location, and calls with deadlines."""
