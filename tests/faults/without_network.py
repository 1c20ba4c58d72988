"""Commands, one after the other, in a process that reaches nothing: every address but a Unix socket's is refused.

The first argument is a file that gets a line for every attempt, the second a JSON list of command lines.
"""

import json
import socket
import sys
from pathlib import Path

REFUSED = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")


def refuse(log):
    """Refuse connections of this process and of those that it forks; sockets made by Python only."""

    def audit(event, args):
        if event in REFUSED and not (isinstance(args[0], socket.socket) and args[0].family == socket.AF_UNIX):
            with log.open("a") as lines:
                lines.write(f"{event} {args[1:] if isinstance(args[0], socket.socket) else args[:2]}\n")
            raise OSError(101, "Network is unreachable")

    sys.addaudithook(audit)


if __name__ == "__main__":
    refuse(Path(sys.argv[1]))
    from metaphrase.cli import main

    for command in json.loads(sys.argv[2]):
        if status := main(command):
            sys.exit(status)
