"""What a scenario's field may be made of: numbers as people write them, names of dtypes, a section.

Annotations are no texts here (`from __future__ import annotations`): pydantic would compile each.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError, core_schema

from zsim import units
from zsim.errors import InputError
from zsim.plan.spec import TORCH_DTYPE


@dataclass(frozen=True)
class Range:
    """The whole numbers low..high, also written "8B" or 5e8; of tokens in a sequence "4k" is 4096.

    The upper ends lie orders of magnitude over anything that was ever run: what is beyond them is a slip, and would be
    simulated for hours or never fit.
    """

    low: int
    high: int
    tokens: bool = False

    def check(self, value: object) -> int:
        accepted = f"a whole number from {self.low:,} to {self.high:,}"
        if self.tokens and isinstance(value, str) and value.strip()[-1:] in ("k", "K"):
            value = value.strip()[:-1] + "Ki"
        try:
            number = units.parse_count(value)
        except InputError as error:
            written = "4096 or 4k (4096)" if self.tokens else "5e8, 500M or 8B"
            why = {"why": error.message, "accepted": f"{accepted}, such as {written}"}
            raise PydanticCustomError("count", "{why}", why) from None
        if not self.low <= number <= self.high:
            raise PydanticCustomError("count", "{why}", {"why": f"{value!r} is out of range", "accepted": accepted})
        return number

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        number = {"type": "number", "minimum": self.low, "maximum": self.high}
        return {"anyOf": [number, {"type": "string", "pattern": r"^[0-9.,_]+([eE][+-]?[0-9]+)? ?[kKMGBT]?$"}]}


Whole = Annotated[int, Range(0, 10**18)]  # of a threshold; users write 1e14 for "no limit"
Positive = Annotated[int, Range(1, 10**18)]  # of a bucket
FEW = Range(1, 10**6)
MICRO_STEPS = Range(1, 10**4)  # every one is simulated
Few = Annotated[int, FEW]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Auto = Literal["auto"]  # of the model's hidden size, as the Hugging Face Trainer does
Precision = Literal["bf16", "fp16", "fp32"]
Loss = Literal[
    "hf", "uncast", "held", "uncast_held", "copied", "copied_held", "copied_uncast", "copied_cast", "compiled", "fused"
]  # fmt: skip


def _in_full(value: object) -> object:
    return TORCH_DTYPE.get(value, value) if isinstance(value, str) else value


# torch's names; the short ones are DeepSpeed's and those of `precision`
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"],
    BeforeValidator(_in_full),
    WithJsonSchema({"enum": [*TORCH_DTYPE.values(), *TORCH_DTYPE], "type": "string"}),
]  # fmt: skip


class Section(BaseModel):
    """`shorthand` names the field that stands for the whole section where it is written as a plain value."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    shorthand: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return value if cls.shorthand is None or isinstance(value, dict) else {cls.shorthand: value}

    def given(self) -> dict[str, Any]:
        """What the user wrote, without what was left out."""
        return {name: getattr(self, name) for name in self.model_fields_set if getattr(self, name) is not None}
