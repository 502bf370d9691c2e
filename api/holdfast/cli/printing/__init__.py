"""What the commands print: columns, sentences about jobs and incidents, and plots. Only `output`
knows whether a result is text or a document; no module here asks a server.
"""
