"""A client that keeps to no rule: raw bytes on the socket and in shared memory."""

import contextlib
import ctypes
import mmap
import os
import socket
import struct

from kalos_ctx.sidecar import endpoint, protocol

PAGE = 4096
BELL_OFF = 96
LIBC = ctypes.CDLL(None)
FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
FUTEX_WAKE = 1
WORDS = struct.Struct("<8Q")
READY = 1


class RawClient:
    """Connects, says hello and holds what it got, for tests that break the rules.

    Attributes
    ----------
    head, hello, extras
        Of the welcome, or of the refusal (`error` then).
    requests, responses : mmap
        The two regions; `requests_fd`, `responses_fd` are kept open.
    """

    def __init__(self, path, *, hello=None, modes=2, transports=1, say_hello=True):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(path))
        self.requests = self.responses = self.error = None
        self.next_id = 1
        if say_hello:
            body = protocol.Hello(modes=modes, transports=transports).body()
            self.sock.sendall(hello or protocol.message(protocol.OP_HELLO, body))
            self.read_welcome()

    def read_welcome(self):
        data, fds = endpoint.receive(self.sock, descriptors=3)
        self.head = protocol.read_head(data[:64])
        body = data[64:]
        if self.head.status:
            self.error = protocol.unpack_error(body)
            return
        self.hello = protocol.Hello.read(body, "sidecar")
        self.extras = protocol.unpack(body[64:])
        self.generation = self.head.generation
        self.status_fd, *rest = fds
        if rest:
            self.requests_fd, self.responses_fd = rest
            self.requests = mmap.mmap(self.requests_fd, PAGE + 8 * self.hello.request_nbytes)
            self.responses = mmap.mmap(
                self.responses_fd, PAGE + 8 * self.hello.response_nbytes, prot=mmap.PROT_READ
            )

    # ---- Shared memory --------------------------------------------------------------------------

    def slot_off(self, i):
        return PAGE + i * self.hello.request_nbytes

    def put(self, i, data, *, word=None, id=None):
        """Write bytes into slot i and its word: that of a ready request with their ID, or given."""
        off = self.slot_off(i)
        self.requests[off : off + len(data)] = data
        number = struct.unpack_from("<Q", data, 8)[0] if id is None else id
        value = number << 8 | READY if word is None else word
        self.requests[8 * i : 8 * i + 8] = struct.pack("<Q", value)
        self.ring()

    def ring(self):
        """Change the doorbell and wake the sidecar where it sleeps on it."""
        (bell,) = struct.unpack_from("<I", self.requests, BELL_OFF)
        struct.pack_into("<I", self.requests, BELL_OFF, (bell + 1) & 0xFFFFFFFF)
        word = ctypes.c_uint32.from_buffer(self.requests, BELL_OFF)
        LIBC.syscall(FUTEX, ctypes.byref(word), FUTEX_WAKE, 1, None, None, 0)
        del word  # the mapping cannot be closed while it is referred to

    def request(self, opcode, body=b"", **fields):
        """A request's bytes, with the next ID unless another is given."""
        fields.setdefault("id", self.next_id)
        fields.setdefault("generation", self.generation)
        self.next_id = max(self.next_id, fields["id"]) + 1
        return protocol.message(opcode, body, **fields)

    def answer_word(self, i):
        """(id, state) of slot i's answer."""
        (word,) = struct.unpack_from("<Q", self.responses, 8 * i)
        return word >> 8, word & 0xFF

    def answer(self, i):
        """(head, body) of slot i's answer."""
        off = PAGE + i * self.hello.response_nbytes
        head = protocol.read_head(bytes(self.responses[off : off + 64]))
        return head, bytes(self.responses[off + 64 : off + 64 + head.body_nbytes])

    # ---- The socket -----------------------------------------------------------------------------

    def read_message(self):
        """The next message that comes by the socket."""
        data = b""
        while len(data) < 64:
            part = self.sock.recv(64 - len(data))
            if not part:
                raise EOFError
            data += part
        head = protocol.read_head(data)
        body = b""
        while len(body) < head.body_nbytes:
            part = self.sock.recv(head.body_nbytes - len(body))
            if not part:
                raise EOFError
            body += part
        return head, body

    def is_closed(self):
        """Whether the sidecar ended the connection, whatever it said before."""
        return endpoint.has_ended(self.sock)

    def close(self):
        self.sock.close()
        for name in ("status_fd", "requests_fd", "responses_fd"):
            with contextlib.suppress(AttributeError, OSError):
                os.close(getattr(self, name))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()
