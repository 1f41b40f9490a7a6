"""What `import fuseboard` costs a process that may never compute: time over bare Python, and proof that torch is out.

Each statement runs in fresh processes, in turn with the others. Nothing is asserted.

    python benchmarks/import_time.py [--quick] [--rounds N] [--json FILE] [--out FILE] [--readme]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from _report import aligned, arguments, keep, listed, machine, versions

STATEMENTS = {
    "bare Python": "pass",
    "import fuseboard": "import fuseboard",
    "bind a policy": "import fuseboard; fuseboard.bind('auto', run=fuseboard.Run()).__enter__()",
    "import torch, for scale": "import torch",
}
ASK = "; import sys; print('torch' in sys.modules)"


def measure(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds for each statement's process, the bare one's median subtracted."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    torch: dict[str, bool] = {}
    for turn in range(-1, rounds):  # the first round fills the page cache and writes bytecode
        for name, source in STATEMENTS.items():
            start = time.perf_counter()
            command = [sys.executable, "-c", source + ASK]
            done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own source
            if turn >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
            torch[name] = done.stdout.strip() == "True"
    bare = statistics.median(times["bare Python"])
    return [
        {
            "name": name,
            "process_ms": round(statistics.median(each), 2),
            "added_ms": round(statistics.median(each) - bare, 2),
            "torch_loaded": torch[name],
        }
        for name, each in times.items()
    ]


def render(result: dict[str, Any]) -> str:
    """The table as text."""
    rows = [
        (row["name"], f"{row['process_ms']:.1f}", f"{row['added_ms']:.1f}", "yes" if row["torch_loaded"] else "no")
        for row in result["rows"]
    ]
    shown = listed(result["versions"])
    facts = f"{result['machine']['cpu']}, {result['machine']['system']}; {shown}; {result['rounds']} processes each."
    return f"{aligned(('milliseconds', 'process, median', 'added', 'torch loaded'), rows)}\n\n{facts}"


def main() -> int:
    parser = arguments(
        __doc__, rounds=20, each="processes per statement", quick="three processes per statement", readme=True
    )
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    result = {
        "rounds": rounds,
        "versions": versions("torch", "fuseboard"),
        "machine": machine(),
        "rows": measure(rounds),
    }
    text = render(result)
    print(text)
    keep(options, "import_time", result, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
