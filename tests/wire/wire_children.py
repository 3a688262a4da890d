"""Client processes of the wire tests."""

import os
import signal
import time

from children import hear, say

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.wire import Client, process_key


def ask_after_fork(address: str) -> None:
    """Use a connection, then fork: the child gets an error, the parent continues."""
    client = Client(address)
    client.request(b"before", 10)
    if not (child := os.fork()):
        try:
            client.request(b"in the child", 10)
        except AsyncFlowError as error:
            client.close()
            os._exit(7 if "fork()" in str(error) else 8)
        os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    say([code, client.request(b"after", 10).decode()])


def identify() -> None:
    say(process_key(os.getpid()))
    hear()


def ask_until_killed(address: str) -> None:
    """Send a request that is never answered."""
    say(process_key(os.getpid()))
    Client(address).request(b"park", 1000)


def interrupted(address: str) -> None:
    """Get Ctrl-C while waiting, then send another request over the same socket."""
    client = Client(address)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        client.request(b"park", 1000)
    except KeyboardInterrupt:
        say(client.request(b"after", 10).decode())
        time.sleep(0.1)
    client.close()
