"""Ray for one run: join the cluster that RAY_ADDRESS names, or start a small one and stop it again."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from envs.errors import UserError

CHECKOUT = Path(__file__).resolve().parent.parent
# Arrays on the way between driver and runners: a few MB an iteration; Ray's own default is 30 % of memory.
OBJECT_STORE_BYTES = 256 * 1024**2
CONNECT_S, FREE_CPUS_S = 5, 60  # how long to wait for an existing cluster's answer, and for its CPUs
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Ray runs its workers 15 steps nicer than this process: beside any other load they would hardly move.
NICENESS = ("RAY_worker_niceness", "0")
STOP_SIGNALS = {signal.SIGTERM, signal.SIGHUP}


def ray_environment(environ: Mapping[str, str], home: Path | None = None) -> dict[str, str]:
    """Variables to set before Ray starts a cluster on this machine, so that only this run can talk to it.

    Ray authenticates by token and, finding none, writes one into the home folder. Here the cluster gets a
    random token of its own, which its processes inherit and which dies with them. A mode, a token or a token
    file that the user has set, or already keeps in `home`, is left as it is; so is an existing cluster.
    RAY_AUTH_MODE is left alone too: Ray's own default is "token", and it reads that variable only once.
    """
    home = Path.home() if home is None else home
    theirs = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(environ.get(name) for name in theirs) or (home / ".ray" / "auth_token").exists():
        return {}
    if environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return {}
    return {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def local_cluster(num_workers: int, object_store_bytes: int = OBJECT_STORE_BYTES) -> Iterator[None]:
    """Ray up inside the block. Does nothing when Ray is already up.

    Workers import the rooms from this checkout: by their search path here, by `working_dir` elsewhere.
    A cluster started here outlives the signals that ask a run to stop, also when every process of the run
    gets them (as from `scancel`): this process is the one that stops it, once it has saved its state.
    Raises UserError when an existing cluster does not answer or lacks the CPUs, and when one cannot be
    started in the half minute that Ray gives itself.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    if address := os.environ.get("RAY_ADDRESS"):
        check_address(address)
        excludes = [".git", ".venv", "runs", "tests", "benchmarks"]
        runtime_env = {"working_dir": str(CHECKOUT), "excludes": excludes, "env_vars": THREADS}
        with _sigterm_handler_kept():
            ray.init(runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR")
    else:
        os.environ.update(THREADS | ray_environment(os.environ))
        os.environ.setdefault(*NICENESS)
        # Ray puts the current folder first on its workers' search path, before PYTHONPATH.
        with _sigterm_handler_kept(), deaf_children(), contextlib.chdir(CHECKOUT):
            try:
                ray.init(
                    num_cpus=max(1, num_workers),
                    include_dashboard=False,
                    object_store_memory=object_store_bytes,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
            except Exception as error:
                if "timed out during startup" not in str(error):
                    raise
                raise UserError(
                    "Ray's processes were not up within 30 s",
                    given=f"load average {os.getloadavg()[0]:.1f}",
                    fix="start again when less else runs on this machine",
                ) from error
    try:
        if address:
            wait_for_cpus(num_workers)
        yield
    finally:
        stop_cluster()


def daemons() -> dict[str, Popen]:
    """Ray's processes that `ray.init` started here, by what they are ("raylet", "gcs_server", ...)."""
    import ray

    node = ray._private.worker._global_node
    return {} if node is None else {kind: infos[0].process for kind, infos in node.all_processes.items()}


def lost_daemon() -> str | None:
    """What happened to the cluster that was started here, if it cannot work any more.

    Ray ends a driver without a word: at its next object when the raylet is gone, a minute after the GCS.
    """
    for kind, process in daemons().items():
        if kind in ("raylet", "gcs_server") and process.poll() is not None:
            return f"{kind} (process {process.pid}) ended with code {process.returncode}"
    return None


def stop_cluster() -> None:
    """Leave an existing cluster, end one that was started here."""
    import ray

    started = daemons()
    helpers = [pid for process in started.values() for pid in children(process.pid)]
    for process in started.values():
        process.terminate = process.kill  # type: ignore[method-assign]  # they don't hear SIGTERM
    ray.shutdown()
    # Left alone, the raylet's agents hold a port for half a minute, and the next Ray here waits for it.
    for pid in helpers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Processes that process `pid` has started and that still run."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, file.read_text().split())
    return found


def check_address(address: str) -> None:
    """Raise UserError when nothing listens at `address` (host:port); Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # "auto" or "local"
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers: {error}",
            given=f"RAY_ADDRESS={address}",
            fix="unset RAY_ADDRESS for a cluster of this run's own, or start one: ray start --head",
        ) from error


def wait_for_cpus(count: int) -> None:
    """Raise UserError when the cluster has not `count` free CPUs; actors without one would wait for ever."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not count:
        return
    group = placement_group([{"CPU": 1.0}] * count)
    free = group.wait(FREE_CPUS_S)
    remove_placement_group(group)
    if not free:
        raise UserError(
            f"the Ray cluster had not {count} free CPUs within {FREE_CPUS_S} s",
            given=f"rollout.num_env_runners={count}",
            allowed=f"it has {ray.cluster_resources().get('CPU', 0):g} in all, "
            f"{ray.available_resources().get('CPU', 0):g} free",
            fix="lower rollout.num_env_runners, or wait for others to finish",
        )


@contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Undo that `ray.init` puts its own SIGTERM handler, which exits at once, over the caller's."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started inside never receive STOP_SIGNALS; neither do theirs, until they unblock them.

    This process goes on to hear them, through a thread that doesn't block them.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()
