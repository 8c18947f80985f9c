//! Products and loads of matrices by a whole warp.

use crate::{
    execute::{Flow, Result, Step},
    machine::Fault,
    program::{Address, Operation, Source, Space},
    scalar,
    warp::LANES,
};

impl Step<'_, '_> {
    // ---- matrices of a whole warp

    pub(crate) fn matrices(&mut self, operation: &Operation) -> Result<Flow> {
        if self.active != u32::MAX {
            return if self.warp.live == u32::MAX && self.active == self.mask {
                Ok(Flow::Held)
            } else {
                Err(Fault("some threads of a warp alone".into()))
            };
        }
        match operation {
            Operation::LoadMatrices { to, from } => self.load_matrices(to, *from)?,
            Operation::Transpose { to, from } => {
                let values: [u64; LANES] = std::array::from_fn(|lane| self.value(*from, lane));
                let at = |row: usize, column: usize| {
                    values[row * 4 + column / 2] >> (16 * (column % 2)) & 0xFFFF
                };
                for lane in 0..LANES {
                    let (row, column) = (lane / 4, lane % 4 * 2);
                    self.set(*to, lane, at(column, row) | at(column + 1, row) << 16);
                }
            }
            Operation::Multiply { sums, a, b } => {
                let a: Vec<Source> = a.iter().map(|&one| Source::Register(one)).collect();
                let a = self.left(&a);
                let right = |step: &Self, k: usize, n: usize| {
                    let word = step.warp.registers[b[k / 8] as usize][n * 4 + k % 8 / 2];
                    scalar::widen((word >> (16 * (k % 2))) as u16)
                };
                self.add_products(sums, &a, right);
            }
            Operation::MultiplyWide { sums, a, b } => {
                let a = if let [described] = a.as_slice() {
                    self.described_left(self.value(*described, 0))?
                } else {
                    self.left(a)
                };
                let columns = sums.len() / 4 * 8;
                let b = self.described(self.value(*b, 0), columns)?;
                self.add_products(sums, &a, |_, k, n| b[n][k]);
            }
            _ => unreachable!("matrices"),
        }
        Ok(Flow::Next)
    }

    pub(crate) fn load_matrices(&mut self, to: &[u32], from: Address) -> Result<()> {
        for (matrix, &to) in to.iter().enumerate() {
            let mut rows = [[0_u8; 16]; 8];
            for (row, bytes) in rows.iter_mut().enumerate() {
                let address = self.shared_address(from, matrix * 8 + row);
                bytes.copy_from_slice(self.bytes(Space::Shared, address, 0, 16)?);
            }
            for lane in 0..LANES {
                let bytes = &rows[lane / 4][lane % 4 * 4..][..4];
                let word = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
                self.set(to, lane, word.into());
            }
        }
        Ok(())
    }

    /// 16 x 16 in the fragments of four words (PTX ISA, 9.7.14.5.8).
    pub(crate) fn left(&self, words: &[Source]) -> Vec<[f32; 16]> {
        let at = |row: usize, column: usize| {
            let word = row / 8 + column / 8 * 2;
            let lane = row % 8 * 4 + column % 8 / 2;
            scalar::widen((self.value(words[word], lane) >> (16 * (column % 2))) as u16)
        };
        (0..16).map(|row| std::array::from_fn(|column| at(row, column))).collect()
    }

    /// Rows of 16 columns that a descriptor tells: K-major, 128-byte swizzle.
    pub(crate) fn described(&mut self, described: u64, rows: usize) -> Result<Vec<[f32; 16]>> {
        let (first, pitch) = ((described & 0x3FFF) << 4, (described >> 32 & 0x3FFF) << 4);
        if described >> 62 != 1 {
            return Err(Fault("another swizzle".into()));
        }
        let mut found = vec![[0.0; 16]; rows];
        for (row, to) in found.iter_mut().enumerate() {
            let start = first + row as u64 / 8 * pitch + row as u64 % 8 * 128;
            for half in 0..2 {
                let place = start + 16 * half as u64;
                let place = place ^ (place >> 7 & 7) << 4;
                let bytes = self.shared(place, 16)?;
                for (at, pair) in bytes.chunks_exact(2).enumerate() {
                    to[8 * half + at] = scalar::widen(u16::from_le_bytes([pair[0], pair[1]]));
                }
            }
        }
        Ok(found)
    }

    /// The rows of 64 that this warp of a warpgroup has.
    pub(crate) fn described_left(&mut self, described: u64) -> Result<Vec<[f32; 16]>> {
        let all = self.described(described, 64)?;
        Ok(all[self.warp.number % 4 * 16..][..16].to_vec())
    }

    /// Adds 16 columns at once, in f64, and rounds.
    pub(crate) fn add_products(
        &mut self,
        sums: &[u32],
        a: &[[f32; 16]],
        b: impl Fn(&Self, usize, usize) -> f32,
    ) {
        for lane in 0..LANES {
            for (at, &sum) in sums.iter().enumerate() {
                let row = lane / 4 + at % 4 / 2 * 8;
                let column = at / 4 * 8 + lane % 4 * 2 + at % 2;
                let before = f32::from_bits(self.warp.registers[sum as usize][lane] as u32);
                let products = a[row].iter().enumerate();
                let products = products.map(|(k, &a)| f64::from(a) * f64::from(b(self, k, column)));
                let after = products.fold(f64::from(before), |sum, product| sum + product);
                self.set(sum, lane, (after as f32).to_bits().into());
            }
        }
    }
}
