//! A `gap` tensor as a GPU needs it.

use super::{Addresses, ArrayPlace, CodedTensor, whole_array};
use crate::{
    Error, Result, Tensor,
    constants::{CODE_LENGTHS_BYTES, GAP_BYTES_PER_THREAD},
    encoding::gap::{GapSizes, stored as arrays},
    gpu::{
        coding::KernelEncoding,
        needs::TensorId,
        task::{GapTask, Task},
    },
    huffman,
    open::Rect,
};

#[derive(Debug)]
pub(in crate::gpu) struct StoredGap {
    id: TensorId,
    sizes: GapSizes,
    gaps: ArrayPlace,
    output_offsets: ArrayPlace,
    bitstream: ArrayPlace,
    plane: ArrayPlace,
    /// On the host, to find the thread blocks of a range.
    host_offsets: Box<[u8]>,
    code_lengths: Box<[u8; CODE_LENGTHS_BYTES]>,
}

impl StoredGap {
    pub(super) fn read(
        tensor: &Tensor<'_>,
        id: TensorId,
        sizes: GapSizes,
        validate: bool,
    ) -> Result<Self> {
        let codebook = whole_array(tensor, arrays::CODEBOOK, sizes.codebook_bytes())?;
        let host_offsets =
            whole_array(tensor, arrays::OUTPUT_OFFSETS, sizes.output_offsets_bytes())?;
        if validate {
            let checked = huffman::read_codebook(&codebook)
                .and_then(|_| sizes.check_output_offsets(&host_offsets));
            checked.map_err(|error| tensor.locate(error))?;
        }
        let code_lengths = codebook.first_chunk().expect("the layout's codebook has code lengths");
        let [gaps, output_offsets, bitstream, plane] =
            [arrays::GAPS, arrays::OUTPUT_OFFSETS, arrays::BITSTREAM, arrays::PLANE]
                .map(|array| ArrayPlace::of(tensor, id.0, array));
        Ok(Self {
            id,
            sizes,
            gaps,
            output_offsets,
            bitstream,
            plane,
            code_lengths: Box::new(*code_lengths),
            host_offsets: host_offsets.into_owned().into(),
        })
    }

    /// A tensor of one block with these weights, whose arrays lie in as many sections.
    #[cfg(test)]
    pub(in crate::gpu) fn of(weights: &[u8], bytes_per_thread: u32) -> Self {
        let geometry = crate::encoding::gap::Geometry::new(bytes_per_thread, 64).unwrap();
        let tensor = crate::encoding::gap::encode_tensor(weights, geometry, 1000).unwrap();
        let place = |section| ArrayPlace { section: (0, section), offset: 256 };
        Self {
            id: (0, 0),
            sizes: tensor.sizes,
            gaps: place(0),
            output_offsets: place(1),
            bitstream: place(2),
            plane: place(3),
            host_offsets: tensor.output_offsets.into(),
            code_lengths: Box::new([0; CODE_LENGTHS_BYTES]),
        }
    }
}

impl CodedTensor for StoredGap {
    fn coding(&self) -> KernelEncoding {
        KernelEncoding::Gap
    }

    fn kernel(&self) -> usize {
        let bytes = self.sizes.geometry().bytes_per_thread();
        GAP_BYTES_PER_THREAD
            .iter()
            .position(|&known| known == bytes)
            .expect("geometries are checked")
    }

    fn codebook(&self) -> &[u8] {
        &*self.code_lengths
    }

    fn task(
        &self,
        rect: &Rect,
        output: u64,
        first_unit: u64,
        addresses: &dyn Addresses,
    ) -> Result<(Task, u64)> {
        let elements = rect.elements();
        let thread_blocks = self.sizes.thread_blocks_of(&self.host_offsets, &elements)?;
        if thread_blocks.end > u64::from(u32::MAX) {
            let count = thread_blocks.end;
            return Err(Error::limit(
                "thread blocks of a tensor on the GPU",
                count,
                u32::MAX.into(),
            ));
        }
        let units = thread_blocks.end - thread_blocks.start;
        let task = GapTask {
            gaps: addresses.array(self.gaps),
            output_offsets: addresses.array(self.output_offsets),
            bitstream: addresses.array(self.bitstream),
            plane: addresses.array(self.plane),
            table: addresses.table(self.id),
            output,
            elements: self.sizes.elements(),
            bit_count: self.sizes.bit_count(),
            element_begin: elements.start,
            element_end: elements.end,
            first_thread_block: thread_blocks.start,
            thread_blocks: units,
            first_unit,
            threads_per_block: self.sizes.geometry().threads_per_block(),
            ..GapTask::default()
        };
        Ok((task.into(), units))
    }
}
