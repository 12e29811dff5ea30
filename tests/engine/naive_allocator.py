"""PyTorch's caching allocator once more, as plainly as possible: lists that are searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 2**20


@dataclass(eq=False)
class Piece:
    size: int
    state: str = "free"  # free | used | the key of a free that another stream holds up


@dataclass(eq=False)
class Segment:
    address: int
    stream: str
    small: bool
    pieces: list[Piece]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def address_of(self, piece: Piece) -> int:
        return self.address + sum(other.size for other in self.pieces[: self.pieces.index(piece)])

    def merge(self) -> None:
        merged: list[Piece] = []
        for piece in self.pieces:
            if merged and merged[-1].state == piece.state == "free":
                merged[-1].size += piece.size
            else:
                merged.append(piece)
        self.pieces = merged


@dataclass
class NaiveAllocator:
    capacity: int
    segments: list[Segment] = field(default_factory=list)
    retries: int = 0
    next_address: int = 0

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    def malloc(self, nbytes: int, stream: str) -> tuple[Segment, Piece] | None:
        """None: out of memory."""
        size = 512 * -(-nbytes // 512)
        small = size <= MIB
        fits = [
            (piece.size, segment.address_of(piece), segment, piece)
            for segment in self.segments
            if (segment.stream, segment.small) == (stream, small)
            for piece in segment.pieces
            if piece.state == "free" and piece.size >= size
        ]
        if fits:
            *_, segment, piece = min(fits, key=lambda fit: fit[:2])
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else 2 * MIB * -(-size // (2 * MIB))
            if self.reserved + whole > self.capacity:
                self.retries += 1
                self.give_back()
            if self.reserved + whole > self.capacity:
                return None
            piece = Piece(whole)
            segment = Segment(self.next_address, stream, small, [piece])
            self.segments.append(segment)
            self.next_address += whole
        left = piece.size - size
        if left >= 512 if small else left > MIB:
            segment.pieces.insert(segment.pieces.index(piece) + 1, Piece(left))
            piece.size = size
        piece.state = "used"
        return segment, piece

    def free(self, segment: Segment, piece: Piece) -> None:
        piece.state = "free"
        segment.merge()

    def give_back(self) -> None:
        for segment in self.segments:
            for piece in segment.pieces:
                if piece.state != "used":
                    piece.state = "free"
            segment.merge()
        self.segments = [segment for segment in self.segments if any(piece.state != "free" for piece in segment.pieces)]
