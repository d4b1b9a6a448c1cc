"""The server of the debugger page: on this machine only, below a random token, without state of its own.

Needs Starlette, uvicorn, Jinja2 and Pygments, the extra `view`.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable

import uvicorn

from tensorcap.viewer.memory import release_memory
from tensorcap.viewer.pages import HOST, Pages
from tensorcap.viewer.subject import MappingChoice, Subject
from tensorcap_formats.errors import UsageError


def listen(port: int) -> socket.socket:
    """Listen on this machine alone.

    Args:
        port: The port, 0 for any that is free.

    Raises:
        UsageError: It is in use, or not to be had.
    """
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"port {port}: cannot be listened on: {reason}", hint="Take another one: --port 0 takes any."
        ) from None


def serve(
    listener: socket.socket, subject: Subject, *, mapping: MappingChoice = None, opened: Callable[[str], None]
) -> None:
    """Serve the pages until interrupted.

    Args:
        listener: The socket, which is closed at the end.
        subject: What is looked at, which is closed at the end.
        mapping: What belongs together, for another second run.
        opened: Called with the address of the page, once it can be asked for.
    """
    token = secrets.token_urlsafe(24)
    pages = Pages(subject, mapping=mapping)
    # No access log: it would hold the token. No lifespan: nothing is started beside.
    release_memory()
    config = uvicorn.Config(
        pages.app(token), log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    opened(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")
    sys.stdout.flush()
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
        pages.close()
