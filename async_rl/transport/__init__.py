"""The wire: what is said (messages), how it is written (codec), and by which sockets (zmq, memory)."""
