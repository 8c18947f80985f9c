//! Encodes strip by strip: in parallel, in bounded memory, and with the same bytes for any order.
//!
//! The weights of a tile are split into its plane and the exponents of each lane, in the lane's
//! order. Each lane is then written to its own buffer, because a lane's place is known only when
//! the lengths of all lanes are. Copies of 7 bytes at a time join them.

use super::{
    codebook::{Codebook, Entry, NONE, Table},
    geometry::{
        GROUP_UNITS, LANE_UNITS, LANES, MAX_LANE_BITS, Places, ROW_LANES, RUN, STREAM_ALIGNMENT,
        Tile, TileGeometry, UNIT,
    },
    histogram::PairHistogram,
    record::{self, Lengths},
    sizes::{EncodedTensor, TileSizes},
};
use crate::{
    Error, Result, bf16,
    encoding::stored::changed,
    float::{Float, FloatSplit, MAX_KEPT_BYTES, MAX_UNIT_BYTES, with_float},
    huffman::bits::{End, PUSH_BITS},
};

/// Encodes the strips of one tensor; share it between threads.
#[derive(Clone, Debug)]
pub struct Encoder {
    geometry: TileGeometry,
    split: FloatSplit,
    table: Table,
}

/// Bytes that strips add to the arrays of their tensor; reuse it, it keeps its buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedStrips {
    /// 32 bytes per tile; with the tensor's last strip 32 more, the last record.
    pub records: Vec<u8>,
    /// The bits of the tiles, whole bytes; with the tensor's last strip zeros up to a multiple of
    /// 16.
    pub bitstream: Vec<u8>,
    /// One byte per weight, or the kept bits of another float than BF16.
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
    /// Prepares the table of a BF16 tensor: some ten microseconds.
    pub fn new(codebook: &Codebook, geometry: TileGeometry) -> Self {
        Self { geometry, split: FloatSplit::BF16, table: Table::new(codebook) }
    }

    /// The same, for floats that are split in another way.
    #[must_use]
    pub fn split_as(self, split: FloatSplit) -> Self {
        Self { split, ..self }
    }

    /// The bytes of bitstream that a strip takes (without the zeros after the tensor's last), from
    /// which the places of all strips follow: the bit count is 8 times their sum.
    ///
    /// # Errors
    /// Like [`encode_strip`](Self::encode_strip).
    pub fn strip_bytes(&self, strip: u64, weights: &[u8]) -> Result<u64> {
        self.check(strip, weights)?;
        let mut exponents = Exponents::new();
        let mut bytes = 0;
        for tile in self.geometry.tiles(strip) {
            exponents.take(self.split, &tile, weights, &mut []);
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
            let bytes = self.split.plane_bytes(tile.elements() as u64) as usize;
            output.plane.resize(plane + bytes, 0);
            exponents.take(self.split, &tile, weights, &mut output.plane[plane..]);
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
            let padding = end.next_multiple_of(STREAM_ALIGNMENT) - end;
            output.bitstream.resize(output.bitstream.len() + padding as usize, 0);
        }
        Ok(())
    }

    fn check(&self, strip: u64, weights: &[u8]) -> Result<()> {
        let (each, count) = (self.geometry.strip_elements(), self.geometry.strip_count());
        let fits = strip < count
            && weights.len() as u64
                == self.split.bytes() as u64 * each.min(self.geometry.elements() - strip * each);
        Error::unless(fits, || {
            let problem = format!("strip {strip} of {count} does not have {} bytes", weights.len());
            Error::parameter(problem, "pass the weights of a strip that exists")
        })
    }

    /// The bits of each lane's pairs; `None` if one has no code.
    fn lane_bits(&self, exponents: &Exponents) -> Option<[usize; LANES]> {
        let mut bits = [0; LANES];
        for (lane, bits) in bits.iter_mut().enumerate() {
            let (whole, rest) = exponents.lane(lane);
            let mut all = rest.iter().map(|&pair| self.table.get(pair).length).sum::<u32>();
            for unit in whole {
                all += self.table.unit(&unit[lane]).map(|pair| pair.length).iter().sum::<u32>();
            }
            if all >= NONE {
                return None;
            }
            *bits = all as usize;
        }
        Some(bits)
    }
}

/// Encodes `n` little-endian BF16 weights (`2n` bytes), strip by strip.
///
/// # Errors
/// [`Error::Parameter`] if `weights` are not as many as the geometry's elements.
pub fn encode_tensor(weights: &[u8], geometry: TileGeometry) -> Result<EncodedTensor> {
    encode_floats(weights, FloatSplit::BF16, geometry)
}

/// The same, of floats that are split in any way, whose zero bits are not looked at.
///
/// # Errors
/// As [`encode_tensor`].
pub fn encode_floats(
    weights: &[u8],
    split: FloatSplit,
    geometry: TileGeometry,
) -> Result<EncodedTensor> {
    let each = split.bytes();
    if weights.len() as u64 != each as u64 * geometry.elements() {
        let problem = "the weights are not those of the geometry";
        return Err(Error::parameter(problem, "pass a whole tensor"));
    }
    let mut histogram = PairHistogram::default();
    histogram.add_floats(split, weights);
    let codebook = Codebook::from_histogram(&histogram)?;
    let encoder = Encoder::new(&codebook, geometry).split_as(split);
    let mut output = EncodedStrips::default();
    let mut bytes = 0;
    for (strip, weights) in (0..).zip(weights.chunks(each * geometry.strip_elements() as usize)) {
        encoder.encode_strip(strip, weights, bytes, &mut output)?;
        bytes += encoder.strip_bytes(strip, weights)?;
    }
    let codebook = codebook.to_bytes();
    let sizes = TileSizes::new(geometry, 8 * bytes, codebook.len() as u64)?.split_as(split);
    let EncodedStrips { records, bitstream, plane } = output;
    Ok(EncodedTensor { sizes, arrays: [codebook, records, bitstream, plane] })
}

/// The bytes of a tile's lanes together.
fn tile_bytes(lengths: &Lengths) -> usize {
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
    let (mut end, stream) = (End::default(), &mut bitstream[start..]);
    for ((buffer, &bits), length) in buffers.iter().zip(bits).zip(lengths.lanes()) {
        buffer.append(bits, length, &mut end, stream).expect("the stream has room for all lanes");
    }
    bitstream.truncate(start + bytes);
}

/// Pairs of a whole unit.
const UNIT_PAIRS: usize = UNIT / 2;
/// Something of each weight of a tile: unit by unit, in these lane by lane.
type TileUnits = [[[u8; UNIT]; LANES]; LANE_UNITS];

/// The exponents of a tile, and how many pairs a lane has.
struct Exponents {
    units: TileUnits,
    pairs: [usize; LANES],
}

impl Exponents {
    const fn new() -> Self {
        Self { units: [[[0; UNIT]; LANES]; LANE_UNITS], pairs: [0; LANES] }
    }

    /// The whole units of a lane, among those of all, and its pairs after them.
    #[inline]
    fn lane(&self, lane: usize) -> (&[[[u8; UNIT]; LANES]], &[[u8; 2]]) {
        let (whole, rest) = self.units.split_at(self.pairs[lane] / UNIT_PAIRS);
        let rest = rest.first().map_or(&[][..], |unit| unit[lane].as_chunks().0);
        (whole, &rest[..self.pairs[lane] % UNIT_PAIRS])
    }

    /// Splits the weights of a tile of a strip; without a plane, takes their exponents only.
    fn take(&mut self, split: FloatSplit, tile: &Tile, weights: &[u8], plane: &mut [u8]) {
        let weights = &weights[split.bytes() * tile.first..];
        if let Some(places) = tile.places() {
            self.pairs = [2 * UNIT_PAIRS * places.steps(); LANES];
            if split == FloatSplit::BF16 && !plane.is_empty() {
                return self.take_both(places, weights, plane);
            }
        }
        with_float!(split, F => {
            match tile.places() {
                Some(places) => self.take_regular::<F>(places, weights, plane),
                None => self.take_any::<F>(tile, weights, plane),
            }
        });
    }

    /// Takes a tile in which every lane has as many units, by runs of four lanes.
    fn take_regular<F: Float>(&mut self, places: Places, weights: &[u8], plane: &mut [u8]) {
        let (each, kept) = (F::SPLIT.bytes(), F::SPLIT.kept_bits() as usize);
        let mut group_planes = plane.chunks_exact_mut(GROUP_UNITS * kept);
        for (units, at) in self.units.as_chunks_mut::<2>().0.iter_mut().zip(places.iter()) {
            for group in 0..LANES / ROW_LANES {
                let mut plane = group_planes.next();
                for (half, units) in units.iter_mut().enumerate() {
                    let at = each * (at + places.run(group, half));
                    let run = &weights[at..at + each * RUN];
                    let units = units.as_chunks_mut::<ROW_LANES>().0[group].as_flattened_mut();
                    F::exponents(run, units);
                    let Some(plane) = &mut plane else { continue };
                    for (lane, unit) in run.chunks_exact(each * UNIT).enumerate() {
                        F::pack(unit, &mut plane[kept * (2 * lane + half)..]);
                    }
                }
            }
        }
    }

    /// Takes the exponents and the plane, whose order has two units of a lane side by side.
    fn take_both(&mut self, places: Places, weights: &[u8], plane: &mut [u8]) {
        let steps = self.units.as_chunks_mut::<2>().0.iter_mut().zip(places.iter());
        for ((units, at), plane) in steps.zip(plane.as_chunks_mut::<{ 2 * UNIT * LANES }>().0) {
            let mut ordered = [[[0; UNIT]; LANES]; 2];
            for (half, (units, ordered)) in units.iter_mut().zip(&mut ordered).enumerate() {
                let runs = units.as_flattened_mut().as_chunks_mut::<RUN>().0.iter_mut();
                let runs =
                    runs.zip(ordered.as_flattened_mut().as_chunks_mut::<RUN>().0).enumerate();
                for (group, (exponents, plane)) in runs {
                    let at = 2 * (at + half * places.pair / 2 + group * places.group);
                    bf16::split(&weights[at..at + 2 * RUN], exponents, plane);
                }
            }
            for (lane, plane) in plane.as_chunks_mut::<{ 2 * UNIT }>().0.iter_mut().enumerate() {
                plane[..UNIT].copy_from_slice(&ordered[0][lane]);
                plane[UNIT..].copy_from_slice(&ordered[1][lane]);
            }
        }
    }

    fn take_any<F: Float>(&mut self, tile: &Tile, weights: &[u8], mut plane: &mut [u8]) {
        self.pairs = [0; LANES];
        let is_wanted = !plane.is_empty();
        tile.units().for_each(|(lane, unit)| {
            let exponents = &mut self.units[self.pairs[lane] / UNIT_PAIRS][lane];
            let each = F::SPLIT.bytes();
            let weights = &weights[each * unit.at..each * (unit.at + unit.count)];
            F::exponents(weights, &mut exponents[..unit.count]);
            let bytes = F::SPLIT.plane_bytes(unit.count as u64) as usize;
            if is_wanted {
                let own = plane.split_off_mut(..bytes).expect("the plane has room for a tile");
                let (mut whole, mut packed) = ([0; MAX_UNIT_BYTES], [0; MAX_KEPT_BYTES]);
                whole[..weights.len()].copy_from_slice(weights);
                F::pack(&whole[..each * UNIT], &mut packed);
                own.copy_from_slice(&packed[..bytes]);
            }
            if unit.count % 2 == 1 {
                exponents[unit.count] = exponents[unit.count - 1];
            }
            self.pairs[lane] += unit.count.div_ceil(2);
        });
    }
}

/// The bits of a unit's pairs, and how many they are: more than [`PUSH_BITS`] if that is too many.
#[inline]
fn piece([a, b, c, d]: [Entry; 4]) -> (u64, usize) {
    let (mut bits, mut length) = (u64::from(a.bits), a.length);
    for pair in [b, c, d] {
        bits |= u64::from(pair.bits) << (length % 64);
        length += pair.length;
    }
    (bits, length as usize)
}

/// The bits of one lane, from bit 0 on; after them stands anything.
struct LaneBuffer {
    bytes: [u8; MAX_LANE_BITS / 8 + 2 * End::SLACK],
}

impl LaneBuffer {
    const fn new() -> Self {
        Self { bytes: [0; MAX_LANE_BITS / 8 + 2 * End::SLACK] }
    }

    /// Writes the pairs of a lane; their bits, or `None` if one has no code.
    ///
    /// Takes two whole units at a time: eight look-ups make one piece of bits. Longer codes are
    /// written unit by unit, or pair by pair; units use their piece too, or the compiler would make
    /// it after the comparison, and keep eight indices in memory until then.
    fn write(&mut self, table: &Table, exponents: &Exponents, lane: usize) -> Option<usize> {
        let mut end = End::default();
        let (whole, rest) = exponents.lane(lane);
        let (twos, one) = whole.as_chunks::<2>();
        for [first, second] in twos {
            let (first, second) = (&first[lane], &second[lane]);
            let (bits, length) = piece(table.unit(first));
            let (more, more_length) = piece(table.unit(second));
            if length + more_length <= PUSH_BITS {
                end.push(&mut self.bytes, bits | more << length, length + more_length)?;
                continue;
            }
            for (unit, bits, length) in [(first, bits, length), (second, more, more_length)] {
                if length > PUSH_BITS {
                    end = self.push_pairs(end, table, unit.as_chunks().0)?;
                } else {
                    end.push(&mut self.bytes, bits, length)?;
                }
            }
        }
        for pairs in one.iter().map(|unit| unit[lane].as_chunks().0).chain([rest]) {
            if !pairs.is_empty() {
                end = self.push_pairs(end, table, pairs)?;
            }
        }
        Some(end.bit)
    }

    /// Appends this many bits to a stream, and zeros up to a length.
    fn append(&self, bits: usize, length: usize, end: &mut End, stream: &mut [u8]) -> Option<()> {
        const STEP: usize = PUSH_BITS / 8;
        let load =
            |at: usize| u64::from_le_bytes(self.bytes[at..at + 8].try_into().expect("8 bytes"));
        let (steps, rest) = (bits / PUSH_BITS, bits % PUSH_BITS);
        for step in 0..steps {
            end.push(stream, load(step * STEP) & ((1 << PUSH_BITS) - 1), PUSH_BITS)?;
        }
        end.push(stream, load(steps * STEP) & ((1 << rest) - 1), rest)?;
        let mut zeros = length - bits;
        while zeros > 0 {
            let some = zeros.min(PUSH_BITS);
            end.push(stream, 0, some)?;
            zeros -= some;
        }
        Some(())
    }

    /// Pair by pair. The end comes and goes by value, or it would be in memory in the loop above
    /// too.
    #[inline(never)]
    fn push_pairs(&mut self, mut end: End, table: &Table, pairs: &[[u8; 2]]) -> Option<End> {
        for &pair in pairs {
            let Entry { bits, length } = table.get(pair);
            if length == NONE {
                return None;
            }
            end.push(&mut self.bytes, u64::from(bits), length as usize)?;
        }
        Some(end)
    }
}
