//! Encoding strip by strip: parallel, in bounded memory, and with the same bytes for any order.
//!
//! A tile's weights are split into its plane and into the exponents of each lane, in the lane's
//! order. Each lane is then written to a buffer of its own, since the place of a lane is known when
//! the lengths of all are; a copy by 7 bytes joins them.

use super::exponents::Exponents;
use super::record::{self, Lengths};
use super::table::{self, Table};
use super::writer::{End, LaneBuffer};
use super::{Codebook, Geometry, LANES};
use crate::{Error, Result};

/// The bitstream ends at a multiple of this many bytes.
const STREAM_ALIGNMENT: usize = 16;

/// Encodes the strips of one tensor; share it between threads.
#[derive(Clone, Debug)]
pub struct Encoder {
    geometry: Geometry,
    table: Table,
}

/// What strips add to the arrays of their tensor; reuse it, it keeps its buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedStrips {
    /// 32 bytes a tile; with the tensor's last strip 32 more, the last record.
    pub records: Vec<u8>,
    /// The bits of the tiles, whole bytes; with the tensor's last strip zeros up to a multiple of
    /// 16.
    pub bitstream: Vec<u8>,
    /// One byte a weight.
    pub plane: Vec<u8>,
}

impl EncodedStrips {
    /// Forgets the strips and keeps the memory.
    pub fn clear(&mut self) {
        self.records.clear();
        self.bitstream.clear();
        self.plane.clear();
    }
}

impl Encoder {
    /// Prepares the table of a tensor: some ten microseconds.
    pub fn new(codebook: &Codebook, geometry: Geometry) -> Self {
        Self { geometry, table: Table::new(codebook) }
    }

    /// The bytes of bitstream that a strip takes (without the zeros after the tensor's last), from
    /// which the places of all strips follow: the bit count is 8 times their sum.
    ///
    /// # Errors
    /// As [`encode_strip`](Self::encode_strip).
    pub fn strip_bytes(&self, strip: u64, weights: &[u8]) -> Result<u64> {
        self.check(strip, weights)?;
        let mut exponents = Exponents::new();
        let mut bytes = 0;
        for tile in self.geometry.tiles(strip) {
            exponents.take(&tile, weights, &mut []);
            let bits = self.lane_bits(&exponents).ok_or_else(changed)?;
            bytes += tile_bytes(&Lengths::of(&bits)) as u64;
        }
        Ok(bytes)
    }

    /// Encodes a strip, whose bits begin at byte `first_byte` of the bitstream, and appends it to
    /// `output`.
    ///
    /// # Errors
    /// [`Error::Parameter`] if there is no such strip or `weights` are not as many as it has, and
    /// if a pair occurs that the codebook has no code for, as when the source changed between two
    /// passes. Then `output` holds nothing of use.
    pub fn encode_strip(
        &self,
        strip: u64,
        weights: &[u8],
        first_byte: u64,
        output: &mut EncodedStrips,
    ) -> Result<()> {
        self.check(strip, weights)?;
        let mut exponents = Exponents::new();
        let mut buffers = [const { LaneBuffer::new() }; LANES];
        let before = output.bitstream.len();
        let byte = |output: &EncodedStrips| first_byte + (output.bitstream.len() - before) as u64;
        for tile in self.geometry.tiles(strip) {
            let plane = output.plane.len();
            output.plane.resize(plane + tile.elements(), 0);
            exponents.take(&tile, weights, &mut output.plane[plane..]);
            let mut bits = [0; LANES];
            for (lane, (buffer, bits)) in buffers.iter_mut().zip(&mut bits).enumerate() {
                *bits = buffer.write(&self.table, &exponents, lane).ok_or_else(changed)?;
            }
            let lengths = Lengths::of(&bits);
            output.records.extend(lengths.write(8 * byte(output)));
            join(&buffers, &bits, &lengths, &mut output.bitstream);
        }
        if strip + 1 == self.geometry.strip_count() {
            let end = byte(output);
            output.records.extend(record::last(8 * end));
            let padding = end.wrapping_neg() as usize % STREAM_ALIGNMENT;
            output.bitstream.resize(output.bitstream.len() + padding, 0);
        }
        Ok(())
    }

    fn check(&self, strip: u64, weights: &[u8]) -> Result<()> {
        let each = self.geometry.strip_elements();
        let fits = strip < self.geometry.strip_count()
            && weights.len() as u64 == 2 * each.min(self.geometry.elements() - strip * each);
        if fits {
            return Ok(());
        }
        Err(Error::parameter(
            format!(
                "strip {strip} of {} does not have {} bytes",
                self.geometry.strip_count(),
                weights.len()
            ),
            "pass the weights of a strip that exists",
        ))
    }

    /// The bits of each lane's pairs; `None` where one has no code.
    fn lane_bits(&self, exponents: &Exponents) -> Option<[usize; LANES]> {
        let mut bits = [0; LANES];
        for (lane, bits) in bits.iter_mut().enumerate() {
            let mut sum = 0;
            for unit in exponents.whole(lane) {
                sum += self.table.unit(unit).iter().sum::<u64>();
            }
            sum += exponents.rest(lane).map(|pair| self.table.get(pair)).sum::<u64>();
            if table::is_none(sum) {
                return None;
            }
            *bits = table::length(sum);
        }
        Some(bits)
    }
}

/// The bytes of a tile's lanes together.
pub(super) fn tile_bytes(lengths: &Lengths) -> usize {
    lengths.lanes().iter().sum::<usize>().div_ceil(8)
}

/// Appends the lanes of a tile, each with zeros up to its length, and zeros up to a whole byte.
fn join(
    buffers: &[LaneBuffer; LANES],
    bits: &[usize; LANES],
    lengths: &Lengths,
    bitstream: &mut Vec<u8>,
) {
    let (start, bytes) = (bitstream.len(), tile_bytes(lengths));
    bitstream.resize(start + bytes + End::SLACK, 0);
    let mut end = End::default();
    for ((buffer, &bits), length) in buffers.iter().zip(bits).zip(lengths.lanes()) {
        end.copy(&mut bitstream[start..], buffer, bits);
        end.skip(&mut bitstream[start..], length - bits);
    }
    bitstream.truncate(start + bytes);
}

fn changed() -> Error {
    Error::parameter(
        "the weights are not those of their codebook",
        "keep the source unchanged while it is read",
    )
}
