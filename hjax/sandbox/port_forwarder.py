"""One port of the loopback for a program in a network of its own: what connects to it is passed on.

The program's network namespace has a loopback and nothing else. A socket that was opened there
listens at the port; this process, which is outside, accepts from it and connects to the same port
of the machine's loopback. So the program reaches that port, and no other.
"""

import contextlib
import fcntl
import socket
import struct
import threading

_LOOPBACK = "127.0.0.1"
_CONNECTIONS = 64  # at a time; further ones wait
_CHUNK = 1 << 16
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def listen_in_namespace(port: int) -> socket.socket:
    """Inside the namespace: start its loopback, and listen at a port of it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    request = struct.pack("16sH14x", b"lo", 0)
    found = fcntl.ioctl(listener, _GET_FLAGS, request)
    flags = struct.unpack_from("H", found, 16)[0] | _UP
    fcntl.ioctl(listener, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags))
    listener.bind((_LOOPBACK, port))
    listener.listen(_CONNECTIONS)
    return listener


def forward_connections(listener: socket.socket, port: int) -> None:
    """Outside: pass on what connects, in threads that end with this process."""
    threading.Thread(target=_accept, args=(listener, port), daemon=True).start()


def _accept(listener: socket.socket, port: int) -> None:
    places = threading.Semaphore(_CONNECTIONS)
    while True:
        places.acquire()
        try:
            inner = listener.accept()[0]
        except OSError:
            return
        threading.Thread(target=_connect, args=(inner, port, places), daemon=True).start()


def _connect(inner: socket.socket, port: int, places: threading.Semaphore) -> None:
    try:
        with contextlib.suppress(OSError), inner:
            with socket.create_connection((_LOOPBACK, port)) as outer:
                back = threading.Thread(target=_copy, args=(outer, inner), daemon=True)
                back.start()
                _copy(inner, outer)
                back.join()
    finally:
        places.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on up to their end, and then the end."""
    with contextlib.suppress(OSError):
        while part := source.recv(_CHUNK):
            target.sendall(part)
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)
