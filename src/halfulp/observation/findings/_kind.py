"""What a code stands for: its words, the instruments that find it, and how it is recognized in what they measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..._names import describe_unknown_name, read_own_docstring, register_entry
from .._finding import Finding, Severity, join_and_rank_findings

if TYPE_CHECKING:
    from .._record import Record

FINDING_KINDS: dict[str, type[FindingKind]] = {}
_METHOD_NAME_BY_INSTRUMENT = {"observe": "find_in_record", "audit": "find_in_audit", "forecast": "find_in_forecast"}
# The most that a forecast is sure: the schedule, and the gradients that make the updates, are still to come.
MAX_FORECAST_CONFIDENCE = 0.9


class FindingKind:
    """One code; a subclass in a file of its own overrides the method of each instrument that can show it.

    The class's docstring begins with one sentence that says what is wrong; tables and the docs print it.

    Attributes:
        code: the stable name.
        cure: what to do, unless a finding says something more specific.
        says: the diagnosis in one line, as a template: {place}, [word for one place|word for several], {at_lr}, and the
            evidence's names, of which {name:share} is a share in per cent, the worst of several places; empty for the
            place and the summary.
        write: lines of code that are the cure, to copy; empty where words alone say it.
        role: of the tensors whose map shows it; evidence named role goes before it.
        explained_by: codes of which this one is a mere consequence where both are found.
        shares_cause_with: further codes that have the same cause, and the same cure, where both are found.
        spreads: whether what follows from it shows at other names too.
        wide_cure: what to do where the numbers have float32's digits already; empty where `cure` serves these too.
        worst: the number among the evidence by which the worst of several layers is told: the largest, or with "-"
            before its name the smallest; empty where they do not differ in one number.
    """

    code: ClassVar[str]
    cure: ClassVar[str]
    says: ClassVar[str] = ""
    write: ClassVar[str] = ""
    role: ClassVar[str] = ""
    explained_by: ClassVar[tuple[str, ...]] = ()
    shares_cause_with: ClassVar[tuple[str, ...]] = ()
    spreads: ClassVar[bool] = False
    wide_cure: ClassVar[str] = ""
    worst: ClassVar[str] = ""

    def find_in_record(self, record: Record) -> Iterable[Finding]:
        """Yield this kind's findings from a record of `hu.observe`."""
        return ()

    def find_in_audit(self, audit: Any) -> Iterable[Finding]:
        """Yield this kind's findings from two checkpoints that `hu.audit` compared."""
        return ()

    def find_in_forecast(self, forecast: Any) -> Iterable[Finding]:
        """Yield this kind's findings from a forecast of `hu.forecast`."""
        return ()

    def make_finding(
        self,
        where: str | Iterable[str],
        severity: Severity,
        confidence: float,
        summary: str,
        *,
        is_wide: bool = False,
        cure: str | None = None,
        says: str | None = None,
        write: str | None = None,
        **evidence: Any,
    ) -> Finding:
        """Return a finding of this code.

        The class's lines of code go with the class's cure; with another one those that are given, if any. Other words
        than the class's are `says`, empty for the place and the summary. `is_wide`: the numbers have float32's digits.
        """
        names = (where,) if isinstance(where, str) else tuple(where)
        if is_wide and self.wide_cure:  # lines of code are for numbers of fewer digits
            cure, write = self.wide_cure, ""
        own = self.write if cure in (None, self.cure) else ""
        cure, says = self.cure if cure is None else cure, self.says if says is None else says
        code, role = own if write is None else write, evidence.get("role") or self.role
        causes = (*self.explained_by, *self.shares_cause_with)
        return Finding(self.code, names, severity, confidence, evidence, cure, summary, says, code, role, causes)

    @classmethod
    def list_instruments(cls) -> tuple[str, ...]:
        """Return the instruments that can show it."""
        methods = _METHOD_NAME_BY_INSTRUMENT.items()
        return tuple(name for name, method in methods if getattr(cls, method) is not getattr(FindingKind, method))


def register_finding(kind: type[FindingKind]) -> type[FindingKind]:
    """Make a code known to every instrument, as a class decorator.

    Raises:
        TypeError: it is no FindingKind.
        ValueError: another class has its code, or it has no docstring, code or cure.
    """
    if not (isinstance(kind, type) and issubclass(kind, FindingKind)):
        raise TypeError(f"a finding is a subclass of FindingKind; got {kind!r}")
    for attribute in ("code", "cure"):
        if not getattr(kind, attribute, ""):
            raise ValueError(f"finding {kind.__name__} has no {attribute}: give it one as a class attribute")
    register_entry("finding", FINDING_KINDS, kind.code, kind, read_own_docstring(kind))
    return kind


def get_finding_kind(code: str) -> type[FindingKind]:
    """Return the class of a code."""
    if code not in FINDING_KINDS:
        raise ValueError(describe_unknown_name("finding", code, FINDING_KINDS))
    return FINDING_KINDS[code]


def collect_findings(instrument: str, measured: Any) -> list[Finding]:
    """Return everything that an instrument's measurements show, the worst first."""
    classes: dict[str, str] = {}  # of the module of each name; checkpoints tell none, but how many dimensions there are
    if instrument == "observe":
        classes = {name: tensor.kind for (_, name), tensor in measured.tensors.items()}
        classes |= {name: parameter.kind for name, parameter in measured.parameters.items()}
    elif instrument == "audit":
        classes = {name: f"{len(row.shape)} dimensions" for name, row in measured.tensors.items()}
    most = MAX_FORECAST_CONFIDENCE if instrument == "forecast" else 1.0
    found = []
    for kind in FINDING_KINDS.values():
        for one in getattr(kind(), _METHOD_NAME_BY_INSTRUMENT[instrument])(measured):
            # What a finding's names have in common; nothing where they differ, or are not known.
            kinds = {classes.get(name, "") for name in one.where}
            common = kinds.pop() if len(kinds) == 1 else one.kind
            found.append(replace(one, confidence=min(most, one.confidence), kind=common))
    return join_and_rank_findings(found, FINDING_KINDS)
