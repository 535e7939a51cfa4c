"""Drawing without a screen: the ways MuJoCo has, and the variables that choose one. Imports nothing heavy.

MUJOCO_GL says how MuJoCo draws and must be set before its import, so whoever draws is a process of its own.
"""

from __future__ import annotations

import os

BACKENDS = ("egl", "osmesa")
DEBIAN = "on Debian: apt-get install libegl1 libgl1 (a driver for EGL) or libosmesa6 (drawing in software)"


def backends() -> list[str]:
    """The ways to try, in order; a user who has chosen one knows better."""
    chosen = os.environ.get("MUJOCO_GL")
    return [chosen] if chosen else list(BACKENDS)


def variables(backend: str) -> dict[str, str]:
    """What a child needs in its environment to draw that way."""
    return {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend, "SDL_VIDEODRIVER": "dummy"}
