//! Decoders of tensors into host memory: the trait through which verification gets its bytes, and
//! its implementation on the CPU. Whatever a range of a tensor needs is found and prepared once.

use std::{borrow::Cow, cell::RefCell, fmt::Debug, ops::Range};

use rayon::prelude::*;

use super::{ahead::ReadAhead, slice::Rect, tensor::Tensor};
use crate::{
    Dtype, Error, Result,
    encoding::stored::{DecodeArrays, ReadArrays, ReadBase, Scratch},
    format::Coded,
    huffman::Histogram,
    parallel,
};

/// Decodes tensors into host memory: [`Cpu`], or with the feature `cuda` a GPU (`gpu::GpuDecoder`).
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
/// use df11::{Level, hazmat::Cpu};
///
/// let model = df11::open(&path)?;
/// assert_eq!(model.verify_with(Level::Full, &Cpu, &())?, model.verify(Level::Full, &())?);
/// # Ok(())
/// # }
/// ```
pub trait Decoder: Debug + Send + Sync {
    /// Prepares a tensor: what its parts have in common is done once.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a tensor of a newer version; whatever keeps the decoder from
    /// reading it.
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>>;
}

/// A tensor from which any number of threads read at once.
pub trait PreparedTensor: Send + Sync {
    /// Bytes of the tensor that are decoded together: parts that are cut at multiples of it decode
    /// nothing twice. Any other range can be read too. More than some MiB only for matrices with
    /// rows of some 10,000 weights in the `tile` encoding.
    fn grain(&self) -> u64 {
        2
    }

    /// Decodes a range of the tensor's bytes, which begins and ends between elements, into `out`,
    /// which is as long.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the container is damaged; whatever else keeps the decoder from it.
    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()>;

    /// Checks the gaps and output offsets of a range against the codes, as far as
    /// [`read`](Self::read) does not.
    ///
    /// # Errors
    /// Like [`read`](Self::read).
    fn verify_index(&self, range: Range<u64>) -> Result<()>;
}

/// Decodes on the CPU, each part on the thread that asks for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu;

impl Decoder for Cpu {
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>> {
        Ok(Box::new(TensorReader::new(&tensor)?))
    }
}

/// Cuts a range into those of pieces, each for one thread.
pub(super) fn ranges(range: Range<u64>, grain: u64) -> impl Iterator<Item = Range<u64>> {
    parallel::cut(range, PIECE_BYTES, grain)
}

/// Decoded bytes that one thread makes in one go: large enough to hide the start of a thread block,
/// small enough for a cache.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

thread_local! {
    /// One, and another one while a base is read for a tensor that has the first.
    static SCRATCH: RefCell<Vec<Scratch>> = const { RefCell::new(Vec::new()) };
}

/// Reads the arrays of a tensor, for an alias those of its target; errors name the alias.
///
/// Part of `hazmat`, as the trait is.
#[doc(hidden)]
impl<'m> ReadArrays<'m> for Tensor<'m> {
    fn read(&self, array: usize, range: Range<u64>) -> Result<Cow<'m, [u8]>> {
        self.shard().read_array(self.first_array() + array, range)
    }

    fn read_with<'s>(
        &'s self,
        array: usize,
        range: Range<u64>,
        scratch: &'s mut Vec<u8>,
    ) -> Result<&'s [u8]>
    where
        'm: 's,
    {
        self.shard().read_array_with(self.first_array() + array, range, scratch)
    }

    fn base(&self) -> Result<Box<dyn ReadBase + 'm>> {
        self.prepare_base()
    }
}

/// A tensor prepared for decoding; share it between threads.
pub(crate) struct TensorReader<'m> {
    tensor: Tensor<'m>,
    length: u64,
    /// Sizes and decoder of a coded tensor; all others are stored as they are.
    coded: Option<(Coded, Box<dyn DecodeArrays + 'm>)>,
}

impl<'m> TensorReader<'m> {
    /// Reads and checks the codebook and the output offsets; some tens of microseconds for a large
    /// tensor.
    pub(super) fn new(tensor: &Tensor<'m>) -> Result<Self> {
        let length = tensor.byte_length()?;
        tensor.check_known()?;
        let prepare = |sizes: Coded| {
            let decoder = sizes.prepare(tensor).map_err(|error| tensor.target().locate(error))?;
            Ok::<_, Error>((sizes, decoder))
        };
        let coded = tensor.target().coded()?.map(prepare).transpose()?;
        Ok(Self { tensor: *tensor, length, coded })
    }

    /// Rows of this width in bytes that are decoded together, if columns of them can be decoded
    /// without the others.
    pub(super) fn grain_rows(&self, width: u64) -> Option<u64> {
        self.coded.as_ref().map_or(Some(1), |(sizes, _)| sizes.grain_rows(width))
    }

    fn with_scratch(&self, work: impl FnOnce(&mut Scratch) -> Result<()>) -> Result<()> {
        let mut scratch = SCRATCH.with_borrow_mut(Vec::pop).unwrap_or_default();
        let result = work(&mut scratch).map_err(|error| self.tensor.locate(error));
        scratch.give_back();
        SCRATCH.with_borrow_mut(|kept| kept.push(scratch));
        result
    }

    /// Decodes some columns of some rows, on this thread.
    pub(super) fn read_rect(&self, rect: Rect, out: &mut [u8]) -> Result<()> {
        match &self.coded {
            Some((sizes, decoder)) if !rect.is_run() || sizes.grain_rows(rect.width).is_some() => {
                let Rect { rows, columns, width } = rect;
                let each = sizes.weight_bytes();
                let part = (rows, columns.start / each..columns.end / each, width / each);
                self.with_scratch(|scratch| {
                    decoder.decode_columns(&self.tensor, part, scratch, out)
                })
            }
            _ => {
                let each = (rect.columns.end - rect.columns.start) as usize;
                let mut runs = rect.runs().zip(out.chunks_mut(each));
                runs.try_for_each(|(run, out)| self.read(run, out))
            }
        }
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
        self.with_scratch(|scratch| match &self.coded {
            None => {
                out.copy_from_slice(self.tensor.read_with(0, range, &mut scratch.plane)?);
                Ok(())
            }
            Some((sizes, decoder)) => {
                decoder.decode(&self.tensor, weights(sizes, &range), scratch, out)
            }
        })
    }

    fn verify_index(&self, range: Range<u64>) -> Result<()> {
        match &self.coded {
            Some((sizes, decoder)) if !range.is_empty() => self.with_scratch(|scratch| {
                decoder.verify(&self.tensor, weights(sizes, &range), scratch)
            }),
            _ => Ok(()),
        }
    }
}

/// The weights of a range of a tensor's bytes.
fn weights(sizes: &Coded, bytes: &Range<u64>) -> Range<u64> {
    let each = sizes.weight_bytes();
    bytes.start / each..bytes.end / each
}

/// How often each exponent of a BF16 tensor occurs. Decodes the tensor, piece by piece.
///
/// # Errors
/// [`Error::Parameter`] for another dtype; otherwise as [`Tensor::decode`].
pub fn histogram(tensor: &Tensor<'_>) -> Result<Histogram> {
    if tensor.dtype().is_some_and(|dtype| dtype != Dtype::BF16) {
        let problem = format!("tensor {:?} is not BF16, and has no exponents", tensor.name());
        return Err(Error::parameter(problem, "ask for those of a BF16 tensor"));
    }
    let _ahead = ReadAhead::of([*tensor]);
    let reader = TensorReader::new(tensor)?;
    ranges(0..tensor.byte_length()?, reader.grain())
        .par_bridge()
        .map(|range| {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            reader.read(range, &mut bytes)?;
            Ok(Histogram::of(&bytes))
        })
        .try_reduce(Histogram::default, |mut sum, histogram| {
            sum.merge(&histogram);
            Ok(sum)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_follow_each_other_and_end_at_grains() {
        let length = 5 * PIECE_BYTES + 1234;
        for grain in [2, 96, 300_000, PIECE_BYTES, 3 * PIECE_BYTES, 10 * PIECE_BYTES] {
            for start in [0, 2, 299_998, PIECE_BYTES + 2] {
                let mut end = start;
                for range in ranges(start..length, grain) {
                    assert_eq!(range.start, end);
                    assert!(
                        range.end == length || range.end.is_multiple_of(grain),
                        "{range:?} of {grain}"
                    );
                    end = range.end;
                    let bytes = end - range.start;
                    assert!(bytes > 0 && bytes <= grain.max(PIECE_BYTES));
                }
                assert_eq!(end, length);
            }
        }
    }
}
