"""Ports for tests, which listen on this machine alone."""
import random
import socket


def free_port(count=1):
    """A port where this many in a row were free a moment ago."""
    while True:
        port = random.randrange(20_000, 30_000)
        try:
            for number in range(port, port + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", number))
            return port
        except OSError:
            continue
