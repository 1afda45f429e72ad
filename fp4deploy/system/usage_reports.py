"""Usage reports that libraries send to their vendors on their own: switched off before one of them is imported.

ONNX Runtime 1.31.1 reports by default. Importing it writes a database and a device id to the user's cache and a file
`.ses` to the temporary folder, a session stores events (names of operators, the producer of the file, error messages
with names of layers), and after about ten seconds a thread resolves the vendor's name to upload them.
`disable_telemetry_events()` comes too late for all of it: the files exist by then, and the thread runs (on Linux, seen
with strace). The environment variable is read when the library is loaded, and children inherit it.

`import fp4deploy` switches them off, so that it does not matter which library imports which.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

Environment = TypeVar("Environment", bound=MutableMapping[str, str])

SWITCHES = {
    "ORT_DISABLE_TELEMETRY": "1",  # ONNX Runtime
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, which accelerate and timm import
    "MLFLOW_DISABLE_TELEMETRY": "true",  # also of a tracker that writes to a folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "DO_NOT_TRACK": "1",  # read by several
}


def switch_off(environment: Environment) -> Environment:
    """Let no library send usage reports, whatever the environment says, in place; it is returned.

    >>> switch_off({"ORT_DISABLE_TELEMETRY": "0"})["ORT_DISABLE_TELEMETRY"]
    '1'
    """
    environment.update(SWITCHES)
    return environment
