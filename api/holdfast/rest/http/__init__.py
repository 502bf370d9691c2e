"""What all routes share of HTTP: the guard and the id of a request, its body and parameters; pages,
streams and problem documents as answers. No module here knows a resource.
"""
