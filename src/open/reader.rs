//! Reads decoded bytes of one tensor: what is needed for any range of it is found and prepared
//! once.

use std::{borrow::Cow, cell::RefCell, ops::Range};

use super::{PreparedTensor, Tensor, slice::Rect};
use crate::{
    Error, Result,
    encoding::stored::{DecodeArrays, ReadArrays, Scratch},
    format::Coded,
};

/// Decoded bytes that one thread makes in one go: large enough to hide the start of a thread block,
/// small enough for a cache.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The arrays of a tensor, or of its target; errors name the tensor itself.
#[derive(Clone, Copy)]
pub(crate) struct TensorArrays<'m> {
    tensor: Tensor<'m>,
    first_array: usize,
}

impl<'m> TensorArrays<'m> {
    pub(super) fn of(tensor: &Tensor<'m>) -> Self {
        Self { tensor: *tensor, first_array: tensor.target().record().array_range().start }
    }
}

impl<'m> ReadArrays<'m> for TensorArrays<'m> {
    fn read(&self, array: usize, range: Range<u64>) -> Result<Cow<'m, [u8]>> {
        self.tensor.shard().read_array(self.first_array + array, range)
    }

    fn read_with<'s>(
        &'s self,
        array: usize,
        range: Range<u64>,
        scratch: &'s mut Vec<u8>,
    ) -> Result<&'s [u8]> {
        self.tensor.shard().read_array_with(self.first_array + array, range, scratch)
    }

    fn locate(&self, error: Error) -> Error {
        self.tensor.locate(error)
    }
}

/// A tensor prepared for decoding; share it between threads.
pub(crate) struct TensorReader<'m> {
    arrays: TensorArrays<'m>,
    length: u64,
    /// Of a coded tensor; all others are stored as they are.
    coded: Option<(Coded, Box<dyn DecodeArrays + 'm>)>,
}

impl<'m> TensorReader<'m> {
    /// Reads and checks the codebook and the output offsets; some tens of microseconds for a large
    /// tensor.
    pub(super) fn new(tensor: &Tensor<'m>) -> Result<Self> {
        let length = tensor.byte_length()?;
        tensor.check_known()?;
        let (target, arrays) = (tensor.target(), TensorArrays::of(tensor));
        let coded = match target.coded()? {
            Some(sizes) => {
                let decoder = sizes.prepare(&arrays).map_err(|error| target.locate(error))?;
                Some((sizes, decoder))
            }
            None => None,
        };
        Ok(Self { arrays, length, coded })
    }

    /// Rows of this width in bytes that are decoded together, if columns of them can be decoded
    /// without the others.
    pub(super) fn grain_rows(&self, width: u64) -> Option<u64> {
        self.coded.as_ref().map_or(Some(1), |(sizes, _)| sizes.grain_rows(width))
    }

    /// Decodes some columns of some rows, on this thread.
    pub(super) fn read_rect(&self, rect: &Rect, out: &mut [u8]) -> Result<()> {
        let Rect { rows, columns, width } = rect;
        let Some((_, decoder)) = &self.coded else {
            let each = (columns.end - columns.start) as usize;
            let mut runs = rect.clone().runs().zip(out.chunks_mut(each));
            return runs.try_for_each(|(run, out)| self.read(run, out));
        };
        let part = (rows.clone(), columns.start / 2..columns.end / 2, width / 2);
        SCRATCH.with_borrow_mut(|scratch| decoder.decode_columns(&self.arrays, part, scratch, out))
    }
}

impl PreparedTensor for TensorReader<'_> {
    fn grain(&self) -> u64 {
        self.coded.as_ref().map_or(2, |(sizes, _)| sizes.grain())
    }

    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        assert!(
            range.end <= self.length && range.end - range.start == out.len() as u64,
            "range of the tensor"
        );
        if range.is_empty() {
            return Ok(());
        }
        SCRATCH.with_borrow_mut(|scratch| match &self.coded {
            None => {
                out.copy_from_slice(self.arrays.read_with(0, range, &mut scratch.plane)?);
                Ok(())
            }
            Some((_, decoder)) => {
                decoder.decode(&self.arrays, range.start / 2..range.end / 2, scratch, out)
            }
        })
    }

    fn verify_index(&self, range: Range<u64>) -> Result<()> {
        match &self.coded {
            Some((_, decoder)) if !range.is_empty() => SCRATCH.with_borrow_mut(|scratch| {
                decoder.verify(&self.arrays, range.start / 2..range.end / 2, scratch)
            }),
            _ => Ok(()),
        }
    }
}
