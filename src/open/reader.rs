//! Reads decoded bytes of one tensor: what is needed for any range of it is found and prepared
//! once.

use std::{borrow::Cow, cell::RefCell, ops::Range};

use super::{Encoding, Shard, Tensor, slice::Rect};
use crate::{
    Error, Result,
    encoding::{
        gap::{GapDecoder, GapSizes, Geometry, Span},
        tile::{self, Sizes},
    },
    huffman,
};

/// Decoded bytes that one thread makes in one go: large enough to hide the start of a thread block,
/// small enough for a cache.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// Where a thread reads what is not mapped, piece after piece: at most two chunks and the index,
/// some 4 MiB. Strips of more than a MiB need more, which is given back.
#[derive(Default)]
struct Scratch {
    /// Gaps, or records of tiles.
    index: Vec<u8>,
    bitstream: Vec<u8>,
    plane: Vec<u8>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// What a thread keeps of each buffer.
const KEPT_BYTES: usize = 4 << 20;

impl Scratch {
    fn give_back(&mut self) {
        for buffer in [&mut self.index, &mut self.bitstream, &mut self.plane] {
            if buffer.capacity() > KEPT_BYTES {
                *buffer = Vec::new();
            }
        }
    }
}

/// A tensor prepared for decoding; share it between threads.
pub(crate) struct TensorReader<'m> {
    shard: &'m Shard,
    name: &'m str,
    length: u64,
    stored: ReaderArrays<'m>,
}

/// Arrays by their index in the directory.
enum ReaderArrays<'m> {
    Empty,
    Raw {
        array: usize,
    },
    Gap {
        first_array: usize,
        decoder: Box<GapDecoder>,
        layout: GapSizes,
        output_offsets: Cow<'m, [u8]>,
    },
    Tile {
        first_array: usize,
        decoder: Box<tile::TileDecoder>,
        sizes: Sizes,
    },
}

impl<'m> TensorReader<'m> {
    /// Reads and checks the codebook and the output offsets; some tens of microseconds for a large
    /// tensor.
    pub(super) fn new(tensor: &Tensor<'m>) -> Result<Self> {
        let length = tensor.byte_length()?;
        tensor.check_known()?;
        let target = tensor.target();
        let stored = match target.encoding() {
            Encoding::Raw if length == 0 => ReaderArrays::Empty,
            Encoding::Raw => ReaderArrays::Raw { array: target.record().array_range().start },
            Encoding::Gap => gap(&target).map_err(|error| target.locate(error))?,
            Encoding::Tile => tile(&target).map_err(|error| target.locate(error))?,
            // The target of an alias is none, and `check_known` refused what is unknown.
            Encoding::Alias | Encoding::Unknown(_) => unreachable!("neither alias nor unknown"),
        };
        Ok(Self { shard: tensor.shard(), name: tensor.name(), length, stored })
    }

    /// Bytes that are decoded together.
    pub(super) fn unit(&self) -> u64 {
        match &self.stored {
            ReaderArrays::Tile { sizes, .. } => 2 * sizes.geometry().strip_elements(),
            _ => 2,
        }
    }

    /// Decodes a range of the tensor's bytes, on this thread.
    pub(crate) fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        assert!(
            range.end <= self.length && range.end - range.start == out.len() as u64,
            "range of the tensor"
        );
        match &self.stored {
            ReaderArrays::Empty => Ok(()),
            ReaderArrays::Raw { array } => SCRATCH.with_borrow_mut(|scratch| {
                out.copy_from_slice(self.shard.read_array_with(
                    *array,
                    range,
                    &mut scratch.plane,
                )?);
                Ok(())
            }),
            ReaderArrays::Gap { .. } | ReaderArrays::Tile { .. } if range.is_empty() => Ok(()),
            ReaderArrays::Gap { first_array, decoder, layout, output_offsets } => {
                let elements = range.start / 2..range.end / 2;
                self.with_span(*first_array, layout, output_offsets, &elements, |span, scratch| {
                    let plane =
                        self.shard.read_array_with(first_array + 4, elements.clone(), scratch)?;
                    decoder.decode(span, elements.clone(), plane, out)
                })
            }
            ReaderArrays::Tile { first_array, decoder, sizes } => {
                let elements = range.start / 2..range.end / 2;
                self.with_strips(*first_array, sizes, &elements, |span| {
                    decoder.decode_strips(span, elements.clone(), out)
                })
            }
        }
    }

    /// Rows of this width in bytes that are decoded together, if columns of them can be decoded
    /// without the others.
    pub(super) fn unit_rows(&self, width: u64) -> Option<u64> {
        match &self.stored {
            ReaderArrays::Empty | ReaderArrays::Raw { .. } => Some(1),
            ReaderArrays::Tile { sizes, .. } if 2 * sizes.geometry().columns() == width => {
                Some(sizes.geometry().tile_rows())
            }
            ReaderArrays::Gap { .. } | ReaderArrays::Tile { .. } => None,
        }
    }

    /// Decodes some columns of some rows, on this thread.
    pub(super) fn read_rect(&self, rect: &Rect, out: &mut [u8]) -> Result<()> {
        let Rect { rows, columns, width } = rect;
        match &self.stored {
            ReaderArrays::Tile { first_array, decoder, sizes }
                if self.unit_rows(*width).is_some() =>
            {
                let elements = rows.start * width / 2..rows.end * width / 2;
                let columns = columns.start / 2..columns.end / 2;
                self.with_strips(*first_array, sizes, &elements, |span| {
                    decoder.decode_columns(span, rows.clone(), columns, out)
                })
            }
            _ => {
                let each = (columns.end - columns.start) as usize;
                rect.clone()
                    .runs()
                    .zip(out.chunks_mut(each))
                    .try_for_each(|(run, out)| self.read(run, out))
            }
        }
    }

    /// Checks the whole index of a range of the tensor's bytes against its codes.
    pub(super) fn verify_index(&self, range: Range<u64>) -> Result<()> {
        match &self.stored {
            ReaderArrays::Gap { first_array, decoder, layout, output_offsets } => {
                let elements = range.start / 2..range.end / 2;
                self.with_span(*first_array, layout, output_offsets, &elements, |span, _| {
                    decoder.verify_index(span)
                })
            }
            ReaderArrays::Tile { first_array, decoder, sizes } if !range.is_empty() => {
                let elements = range.start / 2..range.end / 2;
                self.with_strips(*first_array, sizes, &elements, |span| decoder.verify_strips(span))
            }
            _ => Ok(()),
        }
    }

    /// The same error, with this tensor and its container.
    fn locate(&self, error: Error) -> Error {
        error.within(format_args!("tensor {:?}", self.name)).in_file(self.shard.path())
    }

    /// Fetches the span that holds these elements; `work` gets it and scratch for the plane.
    fn with_span(
        &self,
        first_array: usize,
        layout: &GapSizes,
        output_offsets: &[u8],
        elements: &Range<u64>,
        work: impl FnOnce(&Span<'_>, &mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let locate = |error| self.locate(error);
        let thread_blocks = layout.thread_blocks_of(output_offsets, elements).map_err(locate)?;
        let offsets = layout.output_offsets_of(&thread_blocks)?;
        SCRATCH.with_borrow_mut(|Scratch { index, bitstream, plane }| {
            let gaps = self.shard.read_array_with(
                first_array + 1,
                layout.gaps_of(&thread_blocks)?,
                index,
            )?;
            let range = layout.bitstream_of(&thread_blocks)?;
            let bitstream = self.shard.read_array_with(first_array + 3, range, bitstream)?;
            let output_offsets = &output_offsets[offsets.start as usize..offsets.end as usize];
            work(&Span { thread_blocks, gaps, output_offsets, bitstream }, plane).map_err(locate)
        })
    }

    /// Fetches the span of strips that hold these elements. Records are read with it, so that a
    /// tensor's are never all in memory.
    fn with_strips(
        &self,
        first_array: usize,
        sizes: &Sizes,
        elements: &Range<u64>,
        work: impl FnOnce(&tile::Span<'_>) -> Result<()>,
    ) -> Result<()> {
        let locate = |error| self.locate(error);
        let strips = sizes.strips_of(elements)?;
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { index, bitstream, plane } = scratch;
            let records =
                self.shard.read_array_with(first_array + 1, sizes.records_of(&strips)?, index)?;
            let range = sizes.bitstream_of(records, &strips).map_err(locate)?;
            let bitstream = self.shard.read_array_with(first_array + 2, range, bitstream)?;
            let plane =
                self.shard.read_array_with(first_array + 3, sizes.plane_of(&strips)?, plane)?;
            let result = work(&tile::Span { strips, records, bitstream, plane }).map_err(locate);
            scratch.give_back();
            result
        })
    }
}

/// The small arrays of a `gap` tensor, not validated, and what its record says.
pub(crate) struct GapIndex<'m> {
    first_array: usize,
    pub(crate) codebook: Cow<'m, [u8]>,
    pub(crate) layout: GapSizes,
    pub(crate) output_offsets: Cow<'m, [u8]>,
}

impl GapIndex<'_> {
    /// The gap array, by its index in the directory.
    pub(super) fn gaps_array(&self) -> usize {
        self.first_array + 1
    }
}

/// Reads the index of a tensor whose record the directory's validation accepted.
pub(super) fn gap_index<'m>(tensor: &Tensor<'m>) -> Result<GapIndex<'m>> {
    let shard = tensor.shard();
    let record = tensor.record();
    let first_array = record.array_range().start;
    let arrays = &shard.directory().arrays;
    let codebook = shard.read_array(first_array, 0..arrays[first_array].length.get())?;
    let [bytes_per_thread, threads_per_block, bit_count, _] =
        record.parameters.map(zerocopy::little_endian::U64::get);
    let geometry = Geometry::from_parameters(bytes_per_thread, threads_per_block)?;
    let layout = GapSizes::new(
        geometry,
        tensor.elements(),
        bit_count,
        GapSizes::lut_count_of(codebook.len() as u64)?,
    )?;
    let output_offsets = shard.read_array(first_array + 2, 0..layout.output_offsets_bytes())?;
    Ok(GapIndex { first_array, codebook, layout, output_offsets })
}

/// Prepares a tensor.
fn gap<'m>(tensor: &Tensor<'m>) -> Result<ReaderArrays<'m>> {
    let GapIndex { first_array, codebook, layout, output_offsets } = gap_index(tensor)?;
    let lengths = huffman::read_codebook(&codebook)?;
    layout.check_output_offsets(&output_offsets)?;
    let decoder = Box::new(GapDecoder::new(&lengths, &layout));
    Ok(ReaderArrays::Gap { first_array, decoder, layout, output_offsets })
}

/// The codebook of a `tile` tensor, not validated, and what its record says.
pub(crate) struct TileIndex<'m> {
    pub(crate) codebook: Cow<'m, [u8]>,
    pub(crate) sizes: Sizes,
}

/// Reads the codebook of a tensor whose record the directory's validation accepted.
pub(super) fn tile_index<'m>(tensor: &Tensor<'m>) -> Result<TileIndex<'m>> {
    let shard = tensor.shard();
    let first_array = tensor.record().array_range().start;
    let codebook =
        shard.read_array(first_array, 0..shard.directory().arrays[first_array].length.get())?;
    let sizes = tile_sizes(tensor)?;
    Ok(TileIndex { codebook, sizes })
}

/// The sizes of a tensor in the `tile` encoding.
pub(super) fn tile_sizes(tensor: &Tensor<'_>) -> Result<Sizes> {
    let record = tensor.record();
    let codebook = tensor.shard().directory().arrays[record.array_range().start].length.get();
    let [tile_columns, columns, bit_count, _] =
        record.parameters.map(zerocopy::little_endian::U64::get);
    let geometry = tile::Geometry::new(tile_columns, columns, tensor.elements())?;
    Sizes::new(geometry, bit_count, codebook)
}

/// Prepares a tensor.
fn tile<'m>(tensor: &Tensor<'m>) -> Result<ReaderArrays<'m>> {
    let TileIndex { codebook, sizes } = tile_index(tensor)?;
    let codebook = tile::Codebook::from_bytes(&codebook)?;
    let decoder = Box::new(tile::TileDecoder::new(&codebook, &sizes));
    Ok(ReaderArrays::Tile { first_array: tensor.record().array_range().start, decoder, sizes })
}
