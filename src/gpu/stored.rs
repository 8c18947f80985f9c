//! Tensors as a GPU needs them: where their arrays lie in sections, wherever those lie.

use std::{collections::HashMap, ops::Range, sync::Arc};

use cudarc::driver::sys::CUdeviceptr;
use rayon::prelude::*;

use super::{
    needs::{SectionId, TensorId},
    task::GapTask,
};
use crate::{
    Encoding, Error, Model, Result, Tensor,
    constants::{CODE_LENGTHS_BYTES, GAP_BYTES_PER_THREAD},
    encoding::gap::Layout,
    huffman,
};

/// Device addresses of sections, and of decode tables, on one GPU.
pub(super) trait Addresses {
    /// The device address of a section.
    fn section(&self, section: SectionId) -> CUdeviceptr;
    /// The device address of a coded tensor's decode table.
    fn table(&self, tensor: TensorId) -> CUdeviceptr;
}

/// Where an array lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayPlace {
    section: SectionId,
    offset: u64,
}

impl ArrayPlace {
    /// Of a tensor's array, counted from its first one.
    fn of(tensor: &Tensor<'_>, shard: usize, array: usize) -> Self {
        let directory = tensor.shard().directory();
        let record = &directory.arrays[tensor.record().array_range().start + array];
        Self { section: (shard, record.section.get() as usize), offset: record.offset.get() }
    }

    pub(super) fn address(self, addresses: &dyn Addresses) -> CUdeviceptr {
        addresses.section(self.section) + self.offset
    }
}

/// A tensor's bytes, as they are stored; of no alias.
#[derive(Debug)]
pub(super) enum Stored {
    /// No bytes.
    Empty,
    /// The bytes themselves.
    Raw(ArrayPlace),
    /// The arrays of the `gap` encoding.
    Gap(Box<StoredGap>),
}

#[derive(Debug)]
pub(super) struct StoredGap {
    id: TensorId,
    layout: Layout,
    gaps: ArrayPlace,
    output_offsets: ArrayPlace,
    bitstream: ArrayPlace,
    plane: ArrayPlace,
    /// On the host, to find the thread blocks of a range.
    host_offsets: Box<[u8]>,
    code_lengths: Box<[u8; CODE_LENGTHS_BYTES]>,
}

/// All tensors that are no aliases, by shard and index. Codebooks and output offsets are validated, unless a test wants none of that.
///
/// # Errors
/// [`Error::Corrupt`] where one is malformed; [`Error::Io`].
pub(super) fn read_all(model: &Model, validate: bool) -> Result<HashMap<TensorId, Arc<Stored>>> {
    let shards = model.shards().iter().enumerate();
    let all: Vec<TensorId> = shards
        .flat_map(|(shard, open)| (0..open.directory().tensors.len()).map(move |index| (shard, index)))
        .filter(|&id| model.tensor_at(id).encoding() != Encoding::Alias)
        .collect();
    let stored = all.into_par_iter().map(|id| Ok((id, Arc::new(Stored::read(model, id, validate)?))));
    stored.collect()
}

impl Stored {
    fn read(model: &Model, id: TensorId, validate: bool) -> Result<Self> {
        let tensor = model.tensor_at(id);
        match tensor.encoding() {
            Encoding::Gap => StoredGap::read(&tensor, id, validate).map(|gap| Self::Gap(Box::new(gap))),
            Encoding::Tile => {
                let error =
                    Error::unsupported("the encoding tile on a GPU", "decode on the CPU, or convert to gap");
                Err(tensor.locate(error))
            }
            _ if tensor.byte_length()? == 0 => Ok(Self::Empty),
            _ => Ok(Self::Raw(ArrayPlace::of(&tensor, id.0, 0))),
        }
    }

    /// The code lengths of its codebook, if it is coded.
    pub(super) fn code_lengths(&self) -> Option<&[u8; CODE_LENGTHS_BYTES]> {
        match self {
            Self::Gap(gap) => Some(&gap.code_lengths),
            _ => None,
        }
    }
}

impl StoredGap {
    fn read(tensor: &Tensor<'_>, id: TensorId, validate: bool) -> Result<Self> {
        let index = tensor.gap_index()?;
        if validate {
            let checked = huffman::read_codebook(&index.codebook)
                .and_then(|_| index.layout.check_output_offsets(&index.output_offsets));
            checked.map_err(|error| tensor.locate(error))?;
        }
        let code_lengths = index.codebook.first_chunk().expect("the layout's codebook has code lengths");
        let [gaps, output_offsets, bitstream, plane] =
            [1, 2, 3, 4].map(|array| ArrayPlace::of(tensor, id.0, array));
        Ok(Self {
            id,
            layout: index.layout,
            gaps,
            output_offsets,
            bitstream,
            plane,
            code_lengths: Box::new(*code_lengths),
            host_offsets: index.output_offsets.into_owned().into(),
        })
    }

    /// Which of [`GAP_BYTES_PER_THREAD`] it has.
    pub(super) fn kernel(&self) -> usize {
        let bytes = self.layout.geometry().bytes_per_thread();
        GAP_BYTES_PER_THREAD.iter().position(|&known| known == bytes).expect("geometries are checked")
    }

    /// The task that decodes a range of elements to `output`, but for its place among others.
    pub(super) fn task(
        &self,
        elements: &Range<u64>,
        output: u64,
        addresses: &dyn Addresses,
    ) -> Result<GapTask> {
        let thread_blocks = self.layout.thread_blocks_of(&self.host_offsets, elements)?;
        if thread_blocks.end > u64::from(u32::MAX) {
            let count = thread_blocks.end;
            return Err(Error::limit("thread blocks of a tensor on the GPU", count, u32::MAX.into()));
        }
        Ok(GapTask {
            gaps: self.gaps.address(addresses),
            output_offsets: self.output_offsets.address(addresses),
            bitstream: self.bitstream.address(addresses),
            plane: self.plane.address(addresses),
            table: addresses.table(self.id),
            output,
            elements: self.layout.elements(),
            bit_count: self.layout.bit_count(),
            element_begin: elements.start,
            element_end: elements.end,
            first_thread_block: thread_blocks.start,
            thread_blocks: thread_blocks.end - thread_blocks.start,
            threads_per_block: self.layout.geometry().threads_per_block(),
            ..GapTask::default()
        })
    }

    /// A tensor of one block with these weights, whose arrays lie in as many sections.
    #[cfg(test)]
    pub(super) fn of(weights: &[u8], bytes_per_thread: u32) -> Self {
        let geometry = crate::encoding::gap::Geometry::new(bytes_per_thread, 64).unwrap();
        let tensor = crate::encoding::gap::encode_tensor(weights, geometry, 1000).unwrap();
        let place = |section| ArrayPlace { section: (0, section), offset: 256 };
        Self {
            id: (0, 0),
            layout: tensor.layout,
            gaps: place(0),
            output_offsets: place(1),
            bitstream: place(2),
            plane: place(3),
            host_offsets: tensor.output_offsets.into(),
            code_lengths: Box::new([0; CODE_LENGTHS_BYTES]),
        }
    }

    #[cfg(test)]
    pub(super) fn raw_at(section: usize, offset: u64) -> Stored {
        Stored::Raw(ArrayPlace { section: (0, section), offset })
    }
}
