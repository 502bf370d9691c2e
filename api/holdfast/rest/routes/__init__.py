"""The routes, a module per resource: its `router`, and as `SCHEMAS` the types that no signature
names. The application takes in every module of this room.
"""
