"""One backend in the doctor's report: what its plugin declares, and how it is on each device. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fuseboard.child import Answer
from fuseboard.ops import environment
from fuseboard.registry import Entry, Registry

__all__ = ["ABSENT", "BLOCKED", "BROKEN", "ELSEWHERE", "FAULTY", "NOT_ASKED", "WORKS", "Row"]

WORKS = "works"
ELSEWHERE = "other device"
ABSENT = "not installed"
BROKEN = "broken"
BLOCKED = "blocked"
FAULTY = "faulty"
NOT_ASKED = "not asked"


class Row:
    """One backend's part of the report.

    Attributes:
        name: The backend's.
        distribution: Who ships it.
        state: Of the backend as a whole, once that is known without a device.
        unknown: Devices on which it must be tried.
    """

    def __init__(self, name: str, board: Registry, entries: Sequence[Entry]) -> None:
        entry = board.entry(name) or next(each for each in entries if each.name == name)
        self.name = name
        self.distribution, self._version = entry.distribution, entry.version
        self.unknown: list[str] = []
        self.state: str | None = None
        self._reason = ""
        self._said: dict[str, Any] = {}
        self._devices: list[dict[str, Any]] = []
        self._faults: dict[str, None] = {}  # in the order in which they were found, each once
        if name in board.disabled:
            self.state, self._reason = BLOCKED, board.disabled[name]
        elif board.entry(name) is None:
            self.state = FAULTY
            self._reason = "; ".join(each.message for each in board.faults if each.name == name)

    def take(self, said: dict[str, Any], devices: Sequence[Mapping[str, Any]]) -> None:
        """What the plugin declares; from it, how it is on each device that it need not be tried on."""
        self._said = said
        if said["fault"] is not None:
            self.state, self._reason = FAULTY, said["fault"]
            return
        self._faults |= dict.fromkeys(said["faults"])
        for each in devices:
            name = each["device"]
            why = self._not_meant_for(name, each.get("capability"))
            if why is not None:
                self._add(name, ELSEWHERE, why, "device")
                continue
            absent = next(iter(self._packages()), None)  # the first that it requires is the kernel's own
            if absent is not None and absent["installed"] is None:
                self._add(name, ABSENT, f"{absent['name']} is not installed", "version")
            else:
                self.unknown.append(name)

    def found(self, device: str, answer: Answer) -> None:
        """What a child found out on a device."""
        state = WORKS if answer.ok else ELSEWHERE if answer.stage == "device" else BROKEN
        self._add(device, state, answer.reason, answer.stage, answer)
        self._faults |= dict.fromkeys(answer.faults)

    def _add(self, device: str, state: str, reason: str, stage: str, answer: Answer | None = None) -> None:
        self._devices.append(
            {
                "device": device,
                "state": state,
                "stage": stage or None,
                "reason": reason or None,
                "seconds": None if answer is None else round(answer.seconds, 3),
                "cached": answer is not None and answer.cached,
                "detail": [] if answer is None else list(answer.detail),
                "changed": [] if answer is None else list(answer.changed),
            }
        )

    def _not_meant_for(self, device: str, capability: Any) -> str | None:
        limits = self._said["constraints"]
        kind = device.partition(":")[0]
        if kind not in limits["devices"]:
            return f"runs on {', '.join(limits['devices'])}"
        wanted = limits.get("capability")
        if kind == "cuda" and wanted is not None and isinstance(capability, list):
            low, high = wanted
            if not low <= capability <= high:
                return f"needs compute capability {_dotted(low)} to {_dotted(high)}, {device} has {_dotted(capability)}"
        return None

    def _packages(self) -> list[dict[str, Any]]:
        found = []
        for name, wanted in (self._said.get("info") or {}).get("requires", {}).items():
            have = environment.version(name)
            fits = None if have is None else environment.in_range(have, wanted)
            found.append({"name": name, "installed": have, "wanted": wanted, "fits": fits})
        return found

    def _known_bad(self) -> list[dict[str, Any]]:
        """Those that apply to what is installed. Of an entry without versions the plugin has decided itself."""
        applying = []
        for each in self._said.get("known_bad", ()):
            have = environment.version(each["package"]) if each["package"] else None
            if each["package"] is None or (have and environment.in_range(have, each["versions"] or "") is not False):
                applying.append({key: each[key] for key in ("reason", "link", "package", "versions", "some_calls")})
        return applying

    def _as_a_whole(self) -> tuple[str, str | None]:
        if self.state is not None:
            return self.state, self._reason or None
        for state in (BROKEN, WORKS, ABSENT, ELSEWHERE):
            reasons = [each["reason"] for each in self._devices if each["state"] == state]
            if reasons:
                # Which generation of GPU it needs says more than that it is not for the CPU, which comes first.
                return state, reasons[-1 if state == ELSEWHERE else 0]
        return NOT_ASKED, None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        said, info = self._said, self._said.get("info") or {}
        state, reason = self._as_a_whole()
        return {
            "name": self.name,
            "state": state,
            "reason": reason,
            "faults": list(self._faults),
            "distribution": self.distribution,
            "version": self._version,
            "summary": info.get("summary"),
            "homepage": info.get("homepage") or None,
            "exactness": said.get("exactness"),
            "packages": self._packages(),
            "install": said.get("install"),
            "devices": sorted(self._devices, key=lambda each: _numbered(each["device"])),
            "constraints": said.get("constraints") or {},
            "known_bad": [] if state in (ELSEWHERE, ABSENT) else self._known_bad(),
            "detail": list(said.get("detail", ())),
        }


def _dotted(capability: Sequence[int]) -> str:
    return ".".join(map(str, capability))


def _numbered(device: str) -> tuple[bool, str, int]:
    kind, _, index = device.partition(":")
    return kind != "cpu", kind, int(index or 0)
