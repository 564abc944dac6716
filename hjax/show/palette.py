"""Who has which colour, in every chart: numbers of the classes `c0` ... `c12` of the pages."""

from __future__ import annotations

from hjax.roles import ROLES

OTHER = 7  # what is nobody's
HELD_OUT = 11
ROLE_COLORS = {name: number for number, name in enumerate(ROLES)}
PHASE_COLORS = {"generate": 8, "transition": 12, "prepare": 10, "update": 9}


def metric_color(key: str, usual: int = OTHER) -> int:
    """The colour of a metric's curve: its role's, its phase's, or ``usual``."""
    section, _, name = key.partition("/")
    if section == "eval":
        return HELD_OUT
    if section == "time":
        return PHASE_COLORS.get(name, usual)
    return ROLE_COLORS.get(section, usual)
