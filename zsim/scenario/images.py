"""How many images of which size a scenario's sequences hold, and what was not stated of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.errors import InputError
from zsim.model.spec import Images, ModelSpec

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario

# LLaMA-Factory's image_max_pixels (hparams/model_args.py): 768 x 768.
SIDE = 768


WAITS = (
    "waits for values that a vision-language model asks the GPU for in every step: sizes of images, places of their "
    "tokens, with sdpa the lengths of the sequences in every layer of a tower without one image size"
)


def images_of(scenario: Scenario, model: ModelSpec) -> tuple[Images | None, list[str]]:
    """The images, None of a text model, and notes on what was chosen. Raises InputError."""
    field, seq_len = scenario.fields.images, scenario.fields.seq_len
    vision = getattr(model.arch, "vision", None)
    if vision is None:
        if field is not None:
            raise scenario.error(("images",), f"{model.name} has no vision tower", "null")
        return None, []
    from zsim.model.pixels import check_images, grid, image_tokens

    cut = vision.resolutions or vision.splits or vision.tiles  # into squares: images of any size
    fixed = (vision.image_size,) * 2 if vision.image_size and not cut else None
    size = field.size if field else None
    if size and fixed and size != fixed:
        side = vision.image_size
        raise scenario.error(
            ("images", "size"), f"the tower of {model.name} takes images of {side} x {side} alone", f"[{side}, {side}]"
        )
    height, width = size or fixed or (SIDE, SIDE)
    images = Images(field.per_sequence if field else 1, height, width)
    try:
        check_images(vision, images, seq_len)
    except InputError as error:
        taken = "" if field and (size or fixed) else f"; {height} x {width} pixels are taken where nothing says"
        raise scenario.error(("images",), f"{error.message}{taken}", error.accepted) from None
    if cut:
        rows, columns = images.height, images.width
    else:
        rows, columns = (side * vision.patch for side in grid(vision, images))
    tokens = image_tokens(vision, images)
    chosen = "" if field and (size or fixed) else " (images: ... says otherwise)"
    return images, [
        f"{images.per_sequence} image{'s' if images.per_sequence > 1 else ''} of {rows:,} x {columns:,} pixels in "
        f"every sequence, {images.per_sequence * tokens:,} of its {seq_len:,} tokens{chosen}"
    ]
