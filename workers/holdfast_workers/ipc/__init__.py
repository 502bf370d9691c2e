"""The processes of one node: forking, control sockets, the I/O loop, Linux process calls."""
