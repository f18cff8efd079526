"""``python -m servers.sim``: serve until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys

from .app import App
from .clock import ModelClock, new_event_loop
from .driver import Driver
from .engine import Engine
from .metrics import Metrics
from .options import CalibrationError, OptionError, Options, parse
from .protocol import HttpProtocol


async def serve(options: Options) -> None:
    """Serve until a signal arrives; prints the address first. Raises OSError on a taken port."""
    loop = asyncio.get_running_loop()
    engine = Engine(options.engine, options.calibration, options.seed)
    metrics = Metrics(engine, options.model, options.blocks_override)
    driver = Driver(engine, metrics, ModelClock(options.clock_scale))
    app = App(options, driver)
    connections: set[HttpProtocol] = set()
    server = await loop.create_server(
        lambda: HttpProtocol(app.handle, connections),
        options.host,
        options.port,
        backlog=1024,
        family=socket.AF_UNSPEC,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    port = server.sockets[0].getsockname()[1]
    print(f"listening on http://{options.host}:{port}", flush=True)
    # What exists now lives as long as the process: keep it out of every later collection.
    gc.freeze()
    await stop.wait()
    server.close()
    for connection in list(connections):
        connection.cut()


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 after a signal, 2 for flags or files that cannot be used, 1 for a port that is taken."""
    try:
        options = parse(argv)
    except (OptionError, CalibrationError) as error:
        print(f"servers.sim: {error}", file=sys.stderr)
        return 2
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(serve(options))
        except OSError as error:
            print(
                f"servers.sim: cannot listen on {options.host}:{options.port}: {error.strerror}",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
