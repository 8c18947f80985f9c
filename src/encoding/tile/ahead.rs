//! Bytes that are looked at before they are needed.
//!
//! Q: Why is this fast? Plane and bits come from memory, and the core fetches ahead what is read
//! from start to end at an even pace. Neither is: rows take the plane in four places each, and a
//! tile's bits are copied at once. So between look-ups one byte of each of some lines is read, in
//! order; what it is does not matter.

use std::hint::black_box;

/// Bytes of the plane of half a step.
const PLANE: usize = 256;
/// Bytes of the following bits that are looked at meanwhile: in all those of 4 bits a weight.
const STREAM: usize = 128;
const LINE: usize = 64;

/// What a tile looks at while it is decoded.
pub(super) struct Ahead<'a> {
    plane: &'a [u8],
    /// The bits after the tile.
    stream: &'a [u8],
    seen: u8,
}

impl<'a> Ahead<'a> {
    pub(super) const fn new(plane: &'a [u8], stream: &'a [u8]) -> Self {
        Self { plane, stream, seen: 0 }
    }

    /// Looks at the next lines: the plane of this half step, and as large a part of the following
    /// bits as of the tile.
    #[inline]
    pub(super) fn look(&mut self, half_step: usize) {
        if let Some(plane) = self.plane.get(half_step * PLANE..(half_step + 1) * PLANE) {
            self.seen |= plane[0] | plane[LINE] | plane[2 * LINE] | plane[3 * LINE];
        }
        if let Some(stream) = self.stream.get(half_step * STREAM..(half_step + 1) * STREAM) {
            self.seen |= stream[0] | stream[LINE];
        }
    }

    /// Pretends that what was seen matters, or nothing would be read.
    pub(super) fn finish(self) {
        black_box(self.seen);
    }
}
