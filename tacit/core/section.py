"""What a part of an experiment is made of: frozen, no room for a misspelt key, numbers that are numbers."""

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, model_validator

from tacit.core.text import safe


def not_a_number(wanted: Any, value: object) -> str:
    """Why a value is not the number that is wanted, where one is; else ''. Its range is looked at elsewhere.

    >>> not_a_number(int, True), not_a_number(float | None, "3"), not_a_number(str, "3"), not_a_number(int, 3)
    ('True is not a number; write it without quotes', "'3' is not a number; write it without quotes", '', '')
    """
    origin = typing.get_origin(wanted)
    kinds = typing.get_args(wanted) if origin in (types.UnionType, typing.Union) else (wanted,)
    bare = {typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind for kind in kinds}
    if bare & {int, float} and not bare & {bool, str} and isinstance(value, bool | str):
        return f"{shown(value)} is not a number; write it without quotes"
    return ""


def shown(value: object) -> str:
    """A value in a message: as Python writes it, but short.

    >>> shown("a"), shown(10**50), shown(1 << 20000)
    ("'a'", '100000000000000000000000000000000000000000000000000', 'a number of 20,001 bits')
    """
    try:
        return safe(repr(value), 60)
    except ValueError:  # Python does not write out numbers of more than some thousand digits
        return f"a number of {value.bit_length():,} bits" if isinstance(value, int) else type(value).__name__


class Section(BaseModel):
    """A part of an experiment: frozen, and with no room for a misspelt key."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, given: Any) -> Any:
        """`rounds = true` and `epochs = "3"` are mistakes, not numbers."""
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if name in cls.model_fields and (why := not_a_number(cls.model_fields[name].annotation, value)):
                raise ValueError(f"{name} = {why}, as in {name} = 1")
        return given
