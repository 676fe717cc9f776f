"""What the clients are tried with: schemas that no answer fits by chance."""

from typing import Any

from pydantic import BaseModel, ConfigDict

MODEL = "overlap-spec"
TEXT = "Maria Lopez is 34 years old and lives in Lisbon."
ASKED: list[Any] = [{"role": "user", "content": TEXT}]
# Texts are bounded, so that answers end.
MOST_TOKENS = 200


class Pair(BaseModel):
    """A pair."""

    model_config = ConfigDict(extra="forbid")

    zyx: int
    wvu: bool
