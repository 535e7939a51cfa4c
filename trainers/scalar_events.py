"""TensorBoard's file format for scalars, without importing torch or TensorFlow."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ScalarEvents:
    """A file of scalar events in `folder`, each on disk when `write` returns.

    In a folder that has events already, readers are told to forget those from `first_step` on.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        continued = any(folder.iterdir())
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._event, self._summary = event_pb2, summary_pb2
        self._writer = RecordWriter((folder / name).open("ab"))
        self._put(file_version="brain.Event:2")
        if continued:  # a START record tells readers to forget everything from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._put(session_log=start, step=first_step)

    def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
        scalars = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if value is not None
        ]
        self._put(summary=self._summary.Summary(value=scalars), step=step)

    def _put(self, **fields: Any) -> None:
        self._writer.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when it happened
            self._writer.close()
