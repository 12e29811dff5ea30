"""PyTorch's caching allocator once more, as plainly as possible: lists that are searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

from zsim.plan.spec import Allocator

MIB = 2**20
UNMAPPED = 2**20 * 20 * MIB  # of an expandable segment


@dataclass(eq=False)
class Piece:
    size: int
    state: str = "free"  # free | used | unmapped | the key of a free that another stream holds up
    born: int = 0  # searches before it was cached


@dataclass(eq=False)
class Segment:
    address: int
    stream: str
    small: bool
    pieces: list[Piece]
    expandable: bool = False

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def page(self) -> int:
        return 2 * MIB if self.small else 20 * MIB

    def address_of(self, piece: Piece) -> int:
        return self.address + sum(other.size for other in self.pieces[: self.pieces.index(piece)])

    def merge(self, searches: int) -> None:
        merged: list[Piece] = []
        for piece in self.pieces:
            if merged and merged[-1].state == piece.state and piece.state in ("free", "unmapped"):
                merged[-1].size += piece.size
                merged[-1].born = searches
            else:
                merged.append(piece)
        self.pieces = merged

    def cut(self, piece: Piece, size: int, state: str, born: int) -> None:
        """`piece` is its first `size` bytes; the rest is `state`."""
        if size < piece.size:
            self.pieces.insert(self.pieces.index(piece) + 1, Piece(piece.size - size, state, born))
            piece.size = size


@dataclass
class NaiveAllocator:
    capacity: int
    settings: Allocator
    allowed: int | None = None
    segments: list[Segment] = field(default_factory=list)
    retries: int = 0
    next_address: int = 0
    searches: int = 0

    @property
    def reserved(self) -> int:
        return sum(piece.size for segment in self.segments for piece in segment.pieces if piece.state != "unmapped")

    @property
    def max_split(self) -> float:
        return self.settings.max_split_size_mb * MIB if self.settings.max_split_size_mb else float("inf")

    def rounded(self, nbytes: int) -> int:
        if self.settings.roundup_power2_divisions:
            interval = 0
            while nbytes >= 2 * MIB * 2**interval and interval < 15:
                interval += 1
            divisions = self.settings.roundup_power2_divisions[interval]
            if divisions > 1 and nbytes > 512 * divisions:
                power = 512
                while 2 * power <= nbytes:
                    power *= 2
                candidates = [power + power * step // divisions for step in range(divisions + 1)]
                return next(size for size in candidates if size >= nbytes)
        return 512 * -(-nbytes // 512)

    def malloc(self, nbytes: int, stream: str) -> tuple[Segment, Piece] | None:
        """None: out of memory."""
        size = self.rounded(nbytes)
        small = size <= MIB
        self.searches += not small
        found = self.cached(size, stream, small)
        if found is None:
            if self.allowed is not None and self.settings.garbage_collection_threshold:
                self.collect()
            found = self.new(size, stream, small)
            if found is None and self.release_oversize(size, stream, small):
                found = self.new(size, stream, small)
            if found is None:
                self.retries += 1
                self.give_back()
                found = self.new(size, stream, small)
            if found is None:
                return None
        segment, piece = found
        left = piece.size - size
        easily = small or self.settings.expandable_segments
        if left >= 512 if easily else left > MIB and size < self.max_split:
            segment.cut(piece, size, "free", self.searches)
        piece.state = "used"
        return segment, piece

    def all_free(self, stream: str, small: bool) -> list[tuple[int, int, Segment, Piece]]:
        return sorted(
            (
                (piece.size, segment.address_of(piece), segment, piece)
                for segment in self.segments
                if (segment.stream, segment.small) == (stream, small)
                for piece in segment.pieces
                if piece.state == "free"
            ),
            key=lambda each: each[:2],
        )

    def cached(self, size: int, stream: str, small: bool) -> tuple[Segment, Piece] | None:
        fits = [each for each in self.all_free(stream, small) if each[0] >= size]
        if not fits:
            return None
        if self.settings.expandable_segments:

            def grown(each):
                at = each[2].pieces.index(each[3]) + 1
                beside = each[2].pieces[at : at + 1]
                return each[0] + sum(piece.size for piece in beside if piece.state == "unmapped")

            while len(fits) > 1 and grown(fits[1]) < grown(fits[0]):
                fits.pop(0)
        found, _, segment, piece = fits[0]
        if size < self.max_split <= found or (size >= self.max_split and found >= size + 20 * MIB):
            return None
        return segment, piece

    def new(self, size: int, stream: str, small: bool) -> tuple[Segment, Piece] | None:
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else 2 * MIB * -(-size // (2 * MIB))
        if self.allowed is not None and self.reserved + whole > self.allowed:
            return None
        if self.settings.expandable_segments:
            return self.grow(size, stream, small)
        if self.reserved + whole > self.capacity:
            return None
        segment = Segment(self.next_address, stream, small, [Piece(whole)])
        self.segments.append(segment)
        self.next_address += whole
        return segment, segment.pieces[0]

    def grow(self, size: int, stream: str, small: bool) -> tuple[Segment, Piece] | None:
        """At the lowest address where free and unmapped pieces in a row are enough, one of them unmapped."""
        own = [segment for segment in self.segments if (segment.stream, segment.small) == (stream, small)]
        if not own:
            own = [Segment(self.next_address, stream, small, [Piece(UNMAPPED, "unmapped")], expandable=True)]
            self.segments += own
            self.next_address += UNMAPPED
        segment = own[0]
        for start, piece in enumerate(segment.pieces):
            row: list[Piece] = []
            for other in segment.pieces[start:]:
                if other.state not in ("free", "unmapped") or sum(one.size for one in row) >= size:
                    break
                row.append(other)
            beside = segment.pieces[start + 1 : start + 2]
            if piece.state == "free" and (not beside or beside[0].state != "unmapped"):
                continue
            if sum(one.size for one in row) >= size:
                break
        missing = size
        for one in row:
            if one.state == "unmapped":
                pages = min(-(-missing // segment.page) * segment.page, one.size)
                if self.reserved + pages > self.capacity:
                    segment.merge(self.searches)
                    return None
                segment.cut(one, pages, "unmapped", 0)
                one.state = "free"
            missing -= one.size
        first = row[0]
        segment.merge(self.searches)
        return segment, first

    def free(self, segment: Segment, piece: Piece) -> None:
        piece.state, piece.born = "free", self.searches
        segment.merge(self.searches)

    def give_back(self) -> None:
        for segment in self.segments:
            for piece in segment.pieces:
                if piece.state not in ("used", "unmapped"):
                    piece.state = "free"
            segment.merge(self.searches)
            if segment.expandable:
                for piece in list(segment.pieces):
                    if piece.state == "free":
                        self.unmap(segment, piece)
        self.segments = [
            segment for segment in self.segments if segment.expandable or any(p.state != "free" for p in segment.pieces)
        ]

    def unmap(self, segment: Segment, piece: Piece) -> None:
        start = segment.address_of(piece) - segment.address
        first, last = -(-start // segment.page) * segment.page, (start + piece.size) // segment.page * segment.page
        if first >= last:
            return
        if first > start:
            segment.cut(piece, first - start, "free", self.searches)
            piece = segment.pieces[segment.pieces.index(piece) + 1]
        segment.cut(piece, last - first, "free", self.searches)
        piece.state = "unmapped"
        segment.merge(self.searches)

    def release_oversize(self, size: int, stream: str, small: bool) -> bool:
        if not self.settings.max_split_size_mb or self.settings.expandable_segments:
            return False
        wanted = max(size, self.max_split)
        free = self.all_free(stream, small)
        enough = [each for each in free if each[0] >= wanted]
        if enough:
            self.segments.remove(enough[0][2])
            return True
        released = 0
        for found, _, segment, _ in reversed(free):
            if released < wanted and found >= self.max_split:
                released += found
                self.segments.remove(segment)
        return released >= wanted

    def collect(self) -> None:
        threshold = int(self.settings.garbage_collection_threshold * self.allowed)
        wanted = self.reserved - threshold
        freed = 0
        while not self.settings.expandable_segments and wanted > 0 and freed < wanted:
            whole = [
                segment
                for segment in self.segments
                if not segment.small and len(segment.pieces) == 1 and segment.pieces[0].state == "free"
            ]
            ages = [self.searches - segment.pieces[0].born for segment in whole]
            old = [segment for segment, age in zip(whole, ages, strict=True) if age >= sum(ages) / len(ages)]
            if not old:
                return
            freed += sum(segment.size for segment in old)
            self.segments = [segment for segment in self.segments if segment not in old]
