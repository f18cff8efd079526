"""The life of one Locust process: set up before the load, close after it, leave complete files behind."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import gevent
import msgspec
import requests
from locust import events
from locust.env import Environment
from locust.exception import StopTest

from locustfiles.adhoc import new_run_folder, write_manifest
from locustfiles.arms import ca_bundle
from locustfiles.arrival_clock import kernel_stamps_work
from locustfiles.cell import Cell
from locustfiles.locust_csv import FinalCsv
from locustfiles.options import CellOptions, OptionError, read_options
from locustfiles.point import default_point, read_point
from locustfiles.prompts import TokenCounter, TokenTable, measure_table
from locustfiles.records import cell_id
from locustfiles.token_counter import TokenCountError

logger = logging.getLogger("faceoff")

EXIT_SETUP_FAILED = 2


class SetupError(RuntimeError):
    """The load cannot start; the message says why and what to do, in one line."""


class Runtime:
    """Cells of this process, one per workload, made at each start of a test."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.cells: dict[str, Cell] = {}
        self._adhoc_run: Path | None = None
        self._final_csv: FinalCsv | None = None
        self._exit_code = 0
        atexit.register(self._write_last)

    @property
    def _parsed(self) -> Any:
        return self.environment.parsed_options

    def _quit(self) -> None:
        # In a greenlet of its own: quitting kills the user that may have called this.
        if self.environment.runner is not None:
            gevent.spawn(self.environment.runner.quit)

    @property
    def _headless(self) -> bool:
        return self.environment.web_ui is None

    def set_up(self) -> None:
        """Make the cells of every user class that may run.

        Raises:
            SetupError: in one line, whatever the reason.
        """
        environment = self.environment
        parsed = self._parsed
        try:
            options = read_options(parsed, environment.host or _class_host(environment))
            run = new_run_folder()
            facts = _ServerFacts(options)
            cells: dict[str, Cell] = {}
            for workload in sorted({_workload(user_class) for user_class in environment.user_classes}):
                point = read_point(workload, options.point or default_point(workload))
                users = (parsed.num_users or 1) if self._headless else _target_users(environment)
                name = cell_id(workload, point.text, users, options.repeat, options.arm)
                cells[workload] = Cell(
                    options,
                    workload=workload,
                    point=point,
                    users=users,
                    folder=options.cell_dir or run / "cells" / name,
                    model=facts.model,
                    table=facts.table,
                    clock_scale=facts.clock_scale,
                    counter=facts.counter,
                    on_complete=self._complete,
                    on_error=self._cannot_write,
                )
            self.cells = cells
            if options.cell_dir is None:
                simulated = _version(options).get("simulated") is True
                write_manifest(run, options, cells.values(), simulated)
                self._adhoc_run = run
        except SetupError:
            raise
        except (OptionError, ValueError, TokenCountError) as error:
            raise SetupError(str(error)) from None
        except requests.RequestException as error:
            raise SetupError(f"{environment.host}: {_reason(error)}; is the server up?") from None
        except OSError as error:
            raise SetupError(f"cannot write the results: {error}") from None
        if not kernel_stamps_work():
            logger.warning("no kernel arrival stamps on this system: stamps are taken in user space")
        # What is alive now stays alive: keep the collector from walking it in the middle of the load.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """The load is over: close the cells' files."""
        for cell in self.cells.values():
            try:
                cell.close()
            except OSError as error:
                logger.error("cannot write %s: %s", cell.folder, error)
                self._exit_code = self._exit_code or EXIT_SETUP_FAILED
        if not self._headless:
            self._write_done()

    def take_final_csv(self, exit_code: int) -> None:
        """Locust has stopped every user: take the last state of its statistics."""
        self._exit_code = self._exit_code or exit_code
        parsed = self._parsed
        if parsed.csv_prefix:
            self._final_csv = FinalCsv(
                self.environment, parsed.csv_prefix, bool(parsed.stats_history_enabled)
            )

    def _complete(self) -> None:
        logger.info("every user has finished measuring")
        self._quit()

    def _cannot_write(self, error: OSError) -> None:
        if not self._exit_code:
            self._exit_code = EXIT_SETUP_FAILED
            self.environment.process_exit_code = EXIT_SETUP_FAILED
            print(
                f"faceoff: cannot write the results: {error}; free some space and run again", file=sys.stderr
            )
            self._quit()

    def _write_last(self) -> None:
        try:
            if self._final_csv is not None:
                self._final_csv.write()
            if self._headless:
                self._write_done()
        except OSError as error:
            print(f"faceoff: cannot write the results: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_SETUP_FAILED)  # an exit status can no longer be raised from an exit handler

    def _write_done(self) -> None:
        for cell in self.cells.values():
            cell.close()
            cell.write_done(self._exit_code)
        if self.cells and self._adhoc_run is not None:
            print(
                f"faceoff: the rows are in {self._adhoc_run}; "
                f"to judge them: python -m reports {self._adhoc_run.name}"
            )
        self.cells = {}


class _ServerFacts:
    """What must be known of the server: given and checked by the sweep, else asked."""

    def __init__(self, options: CellOptions) -> None:
        if options.model is not None and options.token_table is not None:
            self.model = options.model
        else:
            self.model = _choose_model(options)
        self.clock_scale = options.clock_scale or self._clock_scale(options)
        if options.token_table is not None:
            self.table = _read_table(options.token_table)
        else:
            self.table = measure_table(self._counter(options), progress=logger.info)
        # A tokenizer whose counts do not add up: every prompt must be counted and mended.
        self.counter = None if self.table.additive else self._counter(options)

    def _counter(self, options: CellOptions) -> TokenCounter:
        return TokenCounter(options.host, self.model, options.headers, options.drop_fields)

    @staticmethod
    def _clock_scale(options: CellOptions) -> float:
        scale = _version(options).get("clock_scale")
        return float(scale) if isinstance(scale, int | float) and scale > 0 else 1.0


def _version(options: CellOptions) -> dict[str, Any]:
    """``/version`` of vLLM and the simulator, {} where there is none."""
    try:
        facts = _get(options, "/version").json()
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _get(options: CellOptions, path: str) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False  # no proxies: the load itself uses none
        session.verify = ca_bundle()
        return session.get(options.host + path, headers=options.headers, timeout=10)


def _choose_model(options: CellOptions) -> str:
    url = f"{options.host}/v1/models"
    answer = _get(options, "/v1/models")
    try:
        models = [str(entry["id"]) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        if options.model is not None:
            return options.model
        raise SetupError(
            f"{url} answers HTTP {answer.status_code} and no list of models: name one with --model"
        ) from None
    listed = ", ".join(models[:8]) or "none"
    if options.model is not None and models and options.model not in models:
        raise SetupError(f"{options.host} does not serve {options.model!r}, it serves {listed}")
    if options.model is None and len(models) != 1:
        raise SetupError(f"{options.host} serves {len(models)} models ({listed}): name one with --model")
    return options.model or models[0]


def _read_table(path: Path) -> TokenTable:
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenTable)
    except msgspec.MsgspecError as error:
        raise SetupError(f"{path} is no token table: {error}") from None


def _class_host(environment: Environment) -> str | None:
    hosts = [user_class.host for user_class in environment.user_classes if user_class.host]
    return str(hosts[0]) if hosts else None


def _target_users(environment: Environment) -> int:
    target: Any = getattr(environment.runner, "target_user_count", 0)
    return int(target) or 1


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.ConnectionError):
        return "cannot connect"
    return str(error)[:200]


def _workload(user_class: Any) -> str:
    return str(user_class.workload)


_runtimes: WeakKeyDictionary[Environment, Runtime] = WeakKeyDictionary()


def runtime(environment: Environment) -> Runtime:
    """The runtime of this environment."""
    return _runtimes[environment]


@events.init.add_listener
def _on_init(environment: Environment, **_: Any) -> None:
    _runtimes[environment] = Runtime(environment)
    if environment.web_ui is None:
        try:
            runtime(environment).set_up()
        except SetupError as error:
            print(f"faceoff: {error}", file=sys.stderr)
            sys.exit(EXIT_SETUP_FAILED)


@events.test_start.add_listener
def _on_test_start(environment: Environment, **_: Any) -> None:
    if environment.web_ui is not None:
        try:
            runtime(environment).set_up()
        except SetupError as error:
            logger.error("%s", error)
            raise StopTest(str(error)) from None


@events.test_stop.add_listener
def _on_test_stop(environment: Environment, **_: Any) -> None:
    runtime(environment).close()


@events.quit.add_listener
def _on_quit(exit_code: int, **_: Any) -> None:
    # Alone of all events this one does not say whose it is: a process has one environment.
    for found in list(_runtimes.values()):
        found.close()
        found.take_final_csv(exit_code)
