"""Long-running operations, such as exports. Each is a row, and any server can carry it out.

A request only stores the row. The connection that asked may break, and the server that works may
end or die: another one, or the next, starts the work again. An effect is stored in the transaction
that ends its operation, so that it happens once.
"""
