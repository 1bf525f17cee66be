"""Version and requirements of a wheel, which works with one torch only: 0.1.0+torch2.11 requires torch==2.11.*.

scikit-build-core (pyproject.toml) calls this module in the Python that has the torch.
"""

import importlib.metadata
import pathlib
import re


def installed_torch():
    """Version of the installed torch, such as 2.11."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("syncbn is compiled against the installed torch, and there is none: install torch 2.11 to "
                         "2.15 first, and run pip with --no-build-isolation") from None
    return ".".join(version.split(".")[:2])


def dynamic_metadata(field, settings):
    torch = installed_torch()
    if field == "dependencies":
        return [f"torch=={torch}.*"]
    lines = pathlib.Path(settings["version-file"]).read_text()
    return re.search(r"syncbn\s+VERSION ([0-9.]+)", lines)[1] + f"+torch{torch}"
