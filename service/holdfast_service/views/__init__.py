"""The API's response models: read-only pydantic values, built from stored rows.

Field names are part of the public API.
"""
