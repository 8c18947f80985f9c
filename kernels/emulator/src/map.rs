//! Tensor maps, in a form of our own: the driver makes them, and only it reads them.

use crate::machine::Fault;

const MAGIC: u32 = 0x70A9_5EED;
const DIMENSIONS: usize = 3;

/// A tensor of two-byte elements in memory, and the box that a copy takes of it.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct TensorMap {
    pub(crate) address: u64,
    pub(crate) dimensions: u32,
    /// In elements.
    pub(crate) sizes: [u64; DIMENSIONS],
    /// In bytes, from the second dimension on.
    pub(crate) pitches: [u64; DIMENSIONS - 1],
    /// In elements.
    pub(crate) boxes: [u32; DIMENSIONS],
}

impl TensorMap {
    pub(crate) const BYTES: usize = 128;

    pub(crate) fn write(&self, to: &mut [u8]) {
        let mut words = vec![u64::from(MAGIC) | u64::from(self.dimensions) << 32, self.address];
        words.extend(self.sizes);
        words.extend(self.pitches);
        words.extend(self.boxes.map(u64::from));
        to.fill(0);
        for (to, word) in to.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }

    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Fault> {
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
            .collect();
        if words[0] as u32 != MAGIC {
            return Err(Fault("there is no tensor map".into()));
        }
        let take = |from: usize| std::array::from_fn(|at| words[from + at]);
        Ok(Self {
            address: words[1],
            dimensions: (words[0] >> 32) as u32,
            sizes: take(2),
            pitches: [words[5], words[6]],
            boxes: [words[7] as u32, words[8] as u32, words[9] as u32],
        })
    }

    pub(crate) fn box_bytes(&self) -> u32 {
        2 * self.boxes[..self.dimensions as usize].iter().product::<u32>()
    }

    /// The bytes of a box, in the order of shared memory from `to` on: rows of 128 bytes whose
    /// pieces of 16 bytes are swizzled. Elements outside of the tensor are zeros.
    pub(crate) fn take(
        &self,
        place: &[i64],
        to: u32,
        mut read: impl FnMut(u64, u64) -> Result<Vec<u8>, Fault>,
    ) -> Result<Vec<u8>, Fault> {
        if place.len() != self.dimensions as usize
            || self.boxes[0] != 64
            || !to.is_multiple_of(1024)
        {
            return Err(Fault(format!("a box that is not emulated: {self:?} to {to:#x}")));
        }
        let outer = if self.dimensions == 3 { self.boxes[2] } else { 1 };
        let mut bytes = Vec::new();
        for third in 0..i64::from(outer) {
            for second in 0..i64::from(self.boxes[1]) {
                let at = [place[0], place[1] + second, place.get(2).map_or(0, |at| at + third)];
                let row = self.row(at, &mut read)?;
                let swizzle = bytes.len() / 128 % 8;
                bytes.extend((0..8).flat_map(|piece| row[(piece ^ swizzle) * 16..][..16].to_vec()));
            }
        }
        Ok(bytes)
    }

    fn row(
        &self,
        at: [i64; 3],
        read: &mut impl FnMut(u64, u64) -> Result<Vec<u8>, Fault>,
    ) -> Result<Vec<u8>, Fault> {
        let mut row = vec![0; 128];
        let inside = |dimension: usize| {
            dimension >= self.dimensions as usize
                || u64::try_from(at[dimension]).is_ok_and(|at| at < self.sizes[dimension])
        };
        if !inside(1) || !inside(2) {
            return Ok(row);
        }
        let pitches = [2, self.pitches[0], self.pitches[1]];
        let offset =
            |dimension: usize| at[dimension].wrapping_mul(pitches[dimension].cast_signed());
        let count = (self.sizes[0].cast_signed() - at[0]).clamp(0, 64) as usize;
        if count > 0 {
            let third = if self.dimensions == 3 { offset(2) } else { 0 };
            let from = self.address.wrapping_add_signed(offset(0) + offset(1) + third);
            row[..2 * count].copy_from_slice(&read(from, 2 * count as u64)?);
        }
        Ok(row)
    }
}
