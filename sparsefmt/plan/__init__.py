"""The planner: compositions of sparse and dense primitives, and the fastest for a layer."""

from typing import TYPE_CHECKING

from .._lazy import facade

if TYPE_CHECKING:
    from .calibration import calibrate as calibrate
    from .calibration import constants_of as constants_of
    from .planner import Candidate as Candidate
    from .planner import Plan as Plan
    from .planner import plan as plan
    from .pricing import Constants as Constants

#: Module -> the public names that it defines; resolved on first use (PEP 562).
_MODULES = {
    "calibration": "calibrate constants_of",
    "planner": "Candidate Plan plan",
    "pricing": "Constants",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)
