"""The studies by the names of ``mia-audit study NAME``."""

from __future__ import annotations

from collections.abc import Callable

from mia_audit.studies.gradients import gradients
from mia_audit.studies.leakage import leakage
from mia_audit.studies.memorization import memorization
from mia_audit.studies.mitigation import mitigation
from mia_audit.studies.result import StudyResult
from mia_audit.studies.setup import StudySetup
from mia_audit.studies.theory import theory

STUDIES: dict[str, Callable[[StudySetup], StudyResult]] = {
    "memorization": memorization,
    "gradients": gradients,
    "leakage": leakage,
    "theory": theory,
    "mitigation": mitigation,
}
