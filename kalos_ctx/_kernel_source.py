"""Where the CUDA sources lie: beside the installed package, else in the checkout."""

from __future__ import annotations

from pathlib import Path

from kalos_ctx.errors import DeviceUnavailable

PLANNER_HEADER = "kalos_plan.h"  # stands for the whole folder: every kernel needs it


def kernel_dir() -> Path:
    """Return the folder that holds the ``.cu`` files and their headers.

    ``kalos_ctx/_kernels`` exists where a wheel was installed; an editable install and a checkout
    have ``cuda/`` beside the package instead.

    Raises
    ------
    DeviceUnavailable
        Neither is there: the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
    places = (package / "_kernels", package.parent / "cuda")
    for place in places:
        if (place / PLANNER_HEADER).is_file():
            return place
    looked = " or ".join(str(place) for place in places)
    raise DeviceUnavailable(f"no kernel sources in {looked}: install kalos-ctx again")
