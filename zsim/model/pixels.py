"""What vision-language models do with images: patches, the windows they attend in, and their place among the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from zsim.errors import InputError
from zsim.model.architecture import Vision
from zsim.model.functional import low, pointwise
from zsim.model.graph import Tensor
from zsim.model.spec import Images
from zsim.model.views import clone, view_of


def grid(vision: Vision, images: Images) -> tuple[int, int]:
    """Rows and columns of patches of one image.

    A tower of any size takes sides that are multiples of its merged patches, rounded as Qwen2-VL's smart_resize does
    (transformers 5.24 image_processing_qwen2_vl.py); limits on the number of pixels are the user's own.
    """
    if vision.image_size:
        side = vision.image_size // vision.patch
        return side, side
    if vision.most_tokens:
        return _filled(vision, images)
    step = vision.patch * vision.merge
    rows, columns = (max(1, round(side / step)) * vision.merge for side in (images.height, images.width))
    return rows, columns


def _filled(vision: Vision, images: Images) -> tuple[int, int]:
    """The largest image of the same shape that has as few tokens, in whole squares of patches (transformers 5.24
    image_processing_gemma4.py get_aspect_ratio_preserving_size)."""
    most, height, width = vision.most_tokens, images.height, images.width
    factor = (most * (vision.pool * vision.patch) ** 2 / (height * width)) ** 0.5
    rows, columns = (int(factor * side / (vision.pool * vision.patch)) for side in (height, width))
    if rows == 0:
        rows, columns = 1, min(width // height, most)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    return rows * vision.pool, columns * vision.pool


def squares(vision: Vision, images: Images) -> tuple[int, int]:
    """Rows and columns of squares that an image is cut into (transformers 5.24 image_processing_utils.py
    select_best_resolution): of the resolution that keeps most of its pixels, and of those the smallest."""

    def fit(resolution: tuple[int, int]) -> tuple[int, int]:
        height, width = resolution
        scale = min(width / images.width, height / images.height)
        kept = min(int(images.width * scale) * int(images.height * scale), images.width * images.height)
        return kept, kept - height * width

    height, width = max(vision.resolutions, key=fit)
    return height // vision.image_size, width // vision.image_size


def squares_in_all(vision: Vision, images: Images) -> int:
    """With the small copy of the image, which is all that there is of several in one sequence of LLaVA-OneVision."""
    if vision.most_squares and images.per_sequence > 1:
        return 1
    if vision.splits:  # image_processing_idefics3.py split_images
        rows, columns = (-(-length // vision.image_size) for length in (images.height, images.width))
        return rows * columns + 1 if rows * columns > 1 else 1
    rows, columns = squares(vision, images)
    return rows * columns + 1


def shrunk(vision: Vision, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that an image's features are interpolated to, where they are more than of `most_squares`
    (modeling_llava_onevision.py pack_image_features)."""
    side = vision.image_size // vision.patch
    ratio = (rows * columns / (vision.most_squares * side**2)) ** 0.5 if vision.most_squares else 1
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


def unpadded(vision: Vision, images: Images) -> tuple[int, int]:
    """Rows and columns of features that are left of all squares' where the image does not fill them
    (modeling_llava_next.py unpad_image)."""
    side = vision.image_size // vision.patch
    rows, columns = (count * side for count in squares(vision, images))
    if images.width / images.height > columns / rows:
        filled = int(round(images.height * (columns / images.width), 7))
        return rows - 2 * ((rows - filled) // 2), columns
    filled = int(round(images.width * (rows / images.height), 7))
    return rows, columns - 2 * ((columns - filled) // 2)


def image_tokens(vision: Vision, images: Images) -> int:
    """Tokens of the text model that one image becomes."""
    if vision.tiles:  # stands for an image that is read in other ways
        return 1
    rows, columns = grid(vision, images)
    if vision.resolutions:  # the small copy, and rows of the large one with an end each
        small = rows * columns + vision.keeps_class_token
        if squares_in_all(vision, images) == 1:
            return small + 1
        large_rows, large_columns = shrunk(vision, *unpadded(vision, images))
        return small + large_rows * (large_columns + 1)
    if vision.splits:
        return squares_in_all(vision, images) * rows * columns // vision.merge**2
    return rows * columns // (vision.merge * vision.pool) ** 2 + vision.keeps_class_token


def check_images(vision: Vision, images: Images, seq_len: int) -> None:
    """Raises InputError where the images do not fit into the sequence."""
    each = image_tokens(vision, images)
    count = images.per_sequence
    if each * count > seq_len:
        which = f"{count} images of {each:,} tokens are" if count > 1 else f"an image of {each:,} tokens is"
        raise InputError(
            f"{which} more than the {seq_len:,} tokens of the sequence",
            field="images",
            accepted="fewer or smaller images, or a longer seq_len: it is the total",
        )


def window_order(vision: Vision, images: Images) -> Iterator[int]:
    """Patches of each window of one image, in the order that they lie in (get_vision_window_index)."""
    side = vision.window // vision.merge // vision.patch
    rows, columns = (_cut(length // vision.merge, side) for length in grid(vision, images))
    return (row * column * vision.merge**2 for row in rows for column in columns)


def _cut(length: int, side: int) -> list[int]:
    rest = length % side
    return [side] * (length // side) + ([rest] if rest else [])


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """`x` times `weight` [outputs, channels, ...]: one product. `shape`: the result's.

    Its autograd node saves input and weight, whichever gradient is asked for (derivatives.yaml, convolution). What
    cuDNN allocates besides is not known and left out.
    """
    tape, x = x.tape, low(x)
    dtype, source = x.dtype, x.shape
    outputs, k = weight.shape[0], prod(weight.shape[1:])
    params = (weight,) if bias is None else (weight, bias)
    x_grad, wanted = x.needs_grad, [param.needs_grad for param in params]
    saved = tape.save(x, weight) if x_grad or any(wanted) else None
    out = tape.empty(shape, dtype)
    tape.gemm(prod(shape) // outputs, outputs, k, dtype)
    if saved:

        def backward(g: Tensor) -> tuple[Tensor | None, ...]:
            kept = saved()  # noqa: F841
            grad_x = tape.empty(source, dtype) if x_grad else None
            grads = [tape.gradient(p, p.shape, dtype) if want else None for p, want in zip(params, wanted, strict=True)]
            if x_grad:
                tape.gemm(g.numel // outputs, k, outputs, dtype)
            if wanted[0]:
                tape.gemm(outputs, k, g.numel // outputs, dtype)
            return grad_x, *grads

        tape.link((x, *params), backward, out)
    return out


def clamped(x: Tensor) -> Tensor:
    """`x.clamp(low, high)` of two tensors: saves `x`. Backward: `where(self >= min & self <= max, grad, 0)`."""
    if not x.needs_grad:
        return pointwise(x)
    tape = x.tape
    saved = tape.save(x)
    out = pointwise(x)

    def backward(g: Tensor) -> tuple[Tensor]:
        (x,) = saved()
        above, below = pointwise(x, dtype="bool"), pointwise(x, dtype="bool")
        tape.memory(above.nbytes + below.nbytes, above.nbytes)
        return (pointwise(g, above),)

    tape.link((x,), backward, out)
    return out


def entry(weight: Tensor) -> Tensor:
    """`weight[i]` of a parameter: a view, whose backward writes zeros of the full shape."""
    out = view_of(weight, weight.shape[1:], weight.strides[1:])
    if weight.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            grad = g.tape.gradient(weight, weight.shape, weight.dtype)
            g.tape.memory(g.nbytes, grad.nbytes + g.nbytes, "copy")
            return (grad,)

        weight.tape.link((weight,), backward, out)
    return out


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`x.masked_scatter(mask, source)` of [b, s, h], [b, s, 1] and the rows of the places where the mask is set.

    On CUDA (torch 2.13 native/cuda/IndexKernel): a copy of x, and for its elements a contiguous mask and an int64
    prefix sum. Backward: `grad.masked_fill(mask, 0)`, and `grad.masked_select(mask)`, which indexes by three int64 per
    element.
    """
    tape = x.tape
    x_grad, source_grad = x.needs_grad, source.needs_grad
    saved = tape.save(mask) if x_grad or source_grad else None
    out = tape.empty(x.shape, x.dtype)
    tape.memory(x.nbytes, out.nbytes, "copy")
    scratch = [tape.empty(x.shape, "int64"), tape.empty(x.shape, "bool")] if tape.cuda else []
    reads = source.nbytes + mask.nbytes + sum(each.nbytes for each in scratch)
    tape.memory(reads, source.nbytes + sum(each.nbytes for each in scratch), "copy")
    del scratch
    if saved:
        rows = source.shape

        def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
            (mask,) = saved()
            grad_x = pointwise(g, mask) if x_grad else None
            grad_source = _selected(g, mask, rows) if source_grad else None
            return grad_x, grad_source

        tape.link((x, source), backward, out)
    return out


def average(x: Tensor, side: int) -> Tensor:
    """`avg_pool2d` of [n, h, s, s] to squares of `side`: saves its input, of which backward asks for the shape."""
    tape, shape, dtype = x.tape, x.shape, x.dtype
    saved = tape.save(x) if x.needs_grad else None
    out = tape.empty((*shape[:2], side, side), dtype)
    tape.memory(x.nbytes, out.nbytes)
    if saved:

        def backward(g: Tensor) -> tuple[Tensor]:
            kept = saved()  # noqa: F841
            grad = tape.empty(shape, dtype)
            tape.memory(g.nbytes, grad.nbytes)
            return (grad,)

        tape.link((x,), backward, out)
    return out


def interpolated(x: Tensor, size: tuple[int, int]) -> Tensor:
    """`interpolate(mode="bilinear")` of [1, h, r, c], which saves nothing."""
    tape, shape, dtype = x.tape, x.shape, x.dtype
    out = tape.empty((*shape[:2], *size), dtype)
    tape.memory(x.nbytes, out.nbytes)
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            grad = tape.empty(shape, dtype)
            tape.memory(g.nbytes, grad.nbytes)
            return (grad,)

        tape.link((x,), backward, out)
    return out


def sampled(x: Tensor, grid: Tensor) -> Tensor:
    """`grid_sample` of [1, h, r, c] in float32 at the places in `grid`, [1, n, 1, 2]: saves both; backward adds into
    zeros, and has a gradient of the grid whoever asks."""
    tape, shape, places = x.tape, x.shape, grid.shape
    saved = tape.save(x, grid) if x.needs_grad else None
    out = tape.empty((1, shape[1], places[1], 1), "float32")
    tape.memory(16 * out.nbytes, out.nbytes)
    if saved:

        def backward(g: Tensor) -> tuple[Tensor]:
            kept = saved()  # noqa: F841
            grad = tape.empty(shape, "float32")
            unread = tape.empty(places, "float32")
            tape.memory(g.nbytes, grad.nbytes + 16 * g.nbytes + unread.nbytes)
            return (grad,)

        tape.link((x,), backward, out)
    return out


def selected(x: Tensor, mask: Tensor, rows: int) -> Tensor:
    """`x[mask, :]` of [b, s, h] and [b, s]: [rows, h]. Saves the mask; backward adds into zeros."""
    tape, dtype, shape = x.tape, x.dtype, x.shape
    saved = tape.save(mask) if x.needs_grad else None
    out = tape.empty((rows, shape[-1]), dtype)
    tape.memory(mask.nbytes + out.nbytes, out.nbytes, "copy")
    if saved:

        def backward(g: Tensor) -> tuple[Tensor]:
            (mask,) = saved()
            zeros = tape.empty(shape, dtype)
            tape.memory(mask.nbytes + 2 * g.nbytes, zeros.nbytes + g.nbytes, "copy")
            if tape.cuda:
                return (zeros,)
            grad = tape.empty(shape, dtype)
            tape.memory(zeros.nbytes, grad.nbytes, "copy")
            return (grad,)

        tape.link((x,), backward, out)
    return out


def put(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """`x[mask, :] = values`, in place: zeros in the gradient of x, and rows of it as that of the values."""
    tape, dtype, rows = x.tape, x.dtype, values.shape
    x_grad, values_grad = x.needs_grad, values.needs_grad
    saved = tape.save(mask) if x_grad or values_grad else None
    out = view_of(x, x.shape, x.strides)
    tape.memory(mask.nbytes + values.nbytes, values.nbytes, "copy")
    if saved:

        def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
            (mask,) = saved()
            grad_x = grad_values = None
            if x_grad:
                zeros = tape.empty((), dtype)  # noqa: F841
                grad_x = tape.empty(g.shape, dtype)
                tape.memory(g.nbytes + mask.nbytes, grad_x.nbytes, "copy")
            if values_grad:
                grad_values = tape.empty(rows, dtype)
                tape.memory(mask.nbytes + grad_values.nbytes, grad_values.nbytes, "copy")
            return grad_x, grad_values

        tape.link((x, values), backward, out)
    return out


def copied(x: Tensor) -> Tensor:
    """`x.clone()`"""
    out = clone(x)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (g,), out)
    return out


def padded(x: Tensor, rows: int) -> Tensor:
    """A copy of [n, t, p, h] with zeros behind p; backward copies what is not padding."""
    tape, (n, t, p, h), dtype = x.tape, x.shape, x.dtype
    out = tape.empty((n, t, rows, h), dtype)
    tape.memory(x.nbytes, out.nbytes + x.nbytes, "copy")
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            return (clone(view_of(g, (n, t, p, h), g.strides)),)

        tape.link((x,), backward, out)
    return out


def stacked(parts: list[Tensor]) -> Tensor:
    """`torch.stack(parts, dim=-1)`; backward gives views."""
    first, shape = parts[0], parts[0].shape
    out = first.tape.empty((*shape, len(parts)), first.dtype)
    first.tape.memory(out.nbytes, out.nbytes, "copy")
    if any(part.needs_grad for part in parts):

        def backward(g: Tensor) -> tuple[Tensor, ...]:
            return tuple(view_of(g, shape, g.strides[:-1]) for _ in parts)

        first.tape.link(tuple(parts), backward, out)
    return out


def unfold(x: Tensor, side: int) -> Tensor:
    """`unfold` of [n, h, rows, columns] into squares that do not overlap: [n, h * side * side, squares]. On CUDA of a
    contiguous copy, where it is none (torch 2.13 native/cuda/Im2Col.cu)."""
    tape, shape, dtype = x.tape, x.shape, x.dtype
    source = x if x.is_contiguous() or not tape.cuda else clone(x)
    squares = shape[2] * shape[3] // side**2
    out = tape.empty((shape[0], shape[1] * side**2, squares), dtype)
    tape.memory(source.nbytes, out.nbytes, "copy")
    del source
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            source = g if g.is_contiguous() or not tape.cuda else clone(g)
            grad = tape.empty(shape, dtype)
            tape.memory(source.nbytes, grad.nbytes, "copy")
            return (grad,)

        tape.link((x,), backward, out)
    return out


def _selected(g: Tensor, mask: Tensor, rows: tuple[int, ...]) -> Tensor:
    tape = g.tape
    places = [tape.empty((*rows,), "int64") for _ in range(3)] if tape.cuda else []
    out = tape.empty(rows, g.dtype)
    index_bytes = sum(each.nbytes for each in places)
    tape.memory(mask.nbytes + out.nbytes + index_bytes, out.nbytes + index_bytes, "copy")
    return out
