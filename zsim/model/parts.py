"""The parts of a vision-language model, by the names of its parameters and modules (transformers 5.24)."""

from __future__ import annotations

# LLaMA-Factory's words (model/model_utils/visual.py), whose parts these are.
PARTS = ("vision_tower", "multi_modal_projector", "language_model")
TOWERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
)  # registered first, before projector and text model
_PROJECTORS = ("multi_modal_projector", "connector", "merger", "embed_vision", "embed_audio", "vision_projection")


def part_of(name: str) -> str:
    """One of `PARTS`."""
    parts = name.split(".")
    if any(part in _PROJECTORS for part in parts):
        return "multi_modal_projector"
    return "vision_tower" if any(part in (*TOWERS, "audio_tower") for part in parts[:2]) else "language_model"
