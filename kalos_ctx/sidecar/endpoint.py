"""The socket that clients find a sidecar by, and who sits at the other end of a connection.

One sidecar a path: an flock on `PATH.lock`, held as long as it lives, says whose the path is. The
socket file itself says nothing: a file whose sidecar died is taken over once nobody answers there,
and at the end only the very file that was made is removed.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from kalos_ctx.errors import Conflict, InvalidArgument, PeerDenied, ProtocolError

PATH_NBYTES_MAX = 107  # sockaddr_un
SO_PEERPIDFD = 77  # Linux 6.5
UCRED = struct.Struct("iII")
BACKLOG = 1024
RECEIVE_NBYTES = 1 << 16


class Endpoint:
    """A listening socket at a path, alone.

    Parameters
    ----------
    path : path-like
        The folder is made, for the owner alone, where it is missing. One that others may write to
        is refused, as is a link.
    shared : bool
        Whether other users may connect; who they may be is checked on every connection.

    Raises
    ------
    InvalidArgument
        The path cannot be used; the message says what to do.
    Conflict
        Another sidecar serves it.
    """

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False) -> None:
        self.path = Path(path).absolute()
        nbytes = len(os.fsencode(self.path))
        if nbytes > PATH_NBYTES_MAX:
            raise InvalidArgument(
                f"the socket's path must have at most {PATH_NBYTES_MAX} bytes (got {nbytes})"
            )
        self._check_folder(shared)
        self._lock = self._take_lock()
        try:
            self.socket = self._bind(shared)
        except BaseException:
            os.close(self._lock)
            raise
        made = self.path.lstat()
        self._made = (made.st_dev, made.st_ino)

    def _check_folder(self, shared: bool) -> None:
        folder = self.path.parent
        if not folder.exists():
            try:
                folder.mkdir(mode=0o711 if shared else 0o700)
            except OSError as error:
                raise InvalidArgument(
                    f"the socket's folder {folder} cannot be made: {error.strerror}"
                ) from None
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise InvalidArgument(f"the socket's folder {folder} must be a folder, and no link")
        if found.st_uid not in (os.getuid(), 0):
            raise InvalidArgument(f"the socket's folder {folder} belongs to another user")
        if found.st_mode & 0o022:
            raise InvalidArgument(
                f"others may write to the socket's folder {folder}; make one of mode 0700"
            )

    def _take_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(f"{self.path}.lock", flags, 0o600)
        except OSError as error:
            raise InvalidArgument(
                f"the lock {self.path}.lock cannot be opened: {error.strerror}"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Conflict(f"another sidecar serves {self.path}") from None
        return lock

    def _bind(self, shared: bool) -> socket.socket:
        self._clear()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)  # nobody connects between the bind and the chmod
        try:
            sock.bind(str(self.path))
        except OSError as error:
            sock.close()
            raise InvalidArgument(
                f"the socket {self.path} cannot be made: {error.strerror}"
            ) from None
        finally:
            os.umask(before)
        if shared:
            self.path.chmod(0o666)
        sock.listen(BACKLOG)
        return sock

    def _clear(self) -> None:
        """Remove the socket of a sidecar that died. Call with the lock held."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise InvalidArgument(f"{self.path} is there and is no socket; nothing was removed")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            code = probe.connect_ex(str(self.path))
        if code != errno.ECONNREFUSED:
            raise Conflict(f"something answers at {self.path} that holds no lock on it")
        self.path.unlink()

    def close(self) -> None:
        """Stop listening, and remove the socket where it is still the one that was made."""
        self.socket.close()
        try:
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self._made:
                self.path.unlink()
        except FileNotFoundError:
            pass
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who sits at the other end.

    Attributes
    ----------
    uid, gid, pid : int
        As the kernel noted them when the connection was made.
    pidfd : int
        Becomes readable when that very process ends; -1 where the kernel gives none.
    """

    uid: int
    gid: int
    pid: int
    pidfd: int = -1


def credentials(sock: socket.socket) -> Credentials:
    """Return the peer's credentials; the pidfd is the caller's to close.

    Raises
    ------
    PeerDenied
        The peer has ended already.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    pid, uid, gid = UCRED.unpack(raw)
    pidfd = -1
    try:
        (pidfd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))
    except OSError:
        try:
            pidfd = os.pidfd_open(pid) if pid else -1
        except ProcessLookupError:
            raise PeerDenied("the peer has ended") from None
        except OSError:
            pidfd = -1  # refused by a filter: the connection's end is the sign of death then
    return Credentials(uid, gid, pid, pidfd)


def has_ended(sock: socket.socket) -> bool:
    """Whether the peer holds its end no more, whatever of what it sent was not read yet."""
    poll = select.poll()
    try:
        poll.register(sock, select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # closed here by another thread
        return True


def receive(sock: socket.socket, *, descriptors: int = 0) -> tuple[bytes, list[int]]:
    """Receive what is there, with at most `descriptors` descriptors.

    Raises
    ------
    ProtocolError
        More came, or some were lost because this process may open no more; none stays open.
    """
    room = socket.CMSG_SPACE(4 * (descriptors + 1))
    data, ancillary, flags, _ = sock.recvmsg(RECEIVE_NBYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if len(fds) > descriptors or flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        if flags & socket.MSG_CTRUNC and descriptors:
            raise ProtocolError(
                "a descriptor was lost on the way: this process may open no more of them "
                "(ulimit -n)"
            )
        raise ProtocolError("descriptors came where the protocol has none; they were closed")
    return data, list(fds)


def send_all(sock: socket.socket, data: bytes, fds: list[int], timeout: float) -> None:
    """Send bytes and descriptors on a socket that may not block; TimeoutError where it does."""
    ancillary = []
    if fds:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
    view = memoryview(data)
    while view:
        try:
            sent = sock.sendmsg([view], ancillary, socket.MSG_NOSIGNAL)
            view, ancillary = view[sent:], []
        except BlockingIOError:
            if not select.select([], [sock], [], timeout)[1]:
                raise TimeoutError("the peer takes nothing") from None
