"""Long work on request, such as an export: a row that any server carries on, whoever asked for it.

A request only stores the row. The connection that asked may break, and the server that works may
end or die: another one, or the next, starts the work again. An effect is stored in the transaction
that ends its operation, so that it happens once.
"""
