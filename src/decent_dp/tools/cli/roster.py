"""``decent-dp roster``: the store of a run, in a process of its own."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from decent_dp.tools.cli.inputs import BadInputError
from decent_dp.tools.cli.screen import say

__all__ = ["EXAMPLES", "roster"]

EXAMPLES = """[bold]Examples[/bold]

decent-dp roster --bind 10.0.0.1:29500

MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 python train.py

Exit codes: 0 after Ctrl-C or SIGTERM, 1 the address cannot be used, 2 bad input."""


def roster(
    bind: Annotated[
        str, typer.Option(help="Where workers reach it. Everybody who does can read and change it.", metavar="HOST:PORT")
    ] = "127.0.0.1:29500",
) -> int:
    """Serve the store of a run, so that it outlives every worker.

    Without it worker 0 keeps the store, or torchrun's agent on the first node does. A run that tolerates faults trains on
    without a store, but its members cannot change.
    """
    host, _, number = bind.rpartition(":")
    if not host or not number.isdecimal() or int(number) > 65535:
        raise BadInputError(f"--bind must be HOST:PORT, such as 127.0.0.1:29500, got '{bind}'")

    from decent_dp.launch.local import store_on

    host = host.strip("[]")
    ended = threading.Event()
    for number_ in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number_, lambda *_: ended.set())
    try:
        store = store_on(host, int(number))
    except OSError as error:
        raise RuntimeError(f"the store cannot listen on {bind}: {error.strerror}. Give an address of this machine.") from error
    say(f"the store is at {host}:{store.port}. In the environment of each worker:")
    say(f"MASTER_ADDR={host} MASTER_PORT={store.port} TORCHELASTIC_USE_AGENT_STORE=True")
    ended.wait()
    return 0
