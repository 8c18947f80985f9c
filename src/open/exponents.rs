//! What is known of a tensor's exponents.

use rayon::prelude::*;

use super::{PreparedTensor, Tensor, decoder::ranges, reader::TensorReader};
use crate::{
    Dtype, Error, Result,
    encoding::stored::ReadArrays as _,
    format::Coded,
    huffman::{self, CodeLengths, Histogram},
};

/// The code lengths of a tensor's exponents, for the `gap` encoding; other encodings have no code
/// for single exponents.
///
/// # Errors
/// [`Error::Corrupt`] or [`Error::Io`].
pub fn code_lengths(tensor: &Tensor<'_>) -> Result<Option<CodeLengths>> {
    let target = tensor.target();
    let Some(Coded::Gap(sizes)) = target.coded()? else { return Ok(None) };
    let codebook = target.arrays().read(0, 0..sizes.codebook_bytes())?;
    huffman::read_codebook(&codebook).map(Some).map_err(|error| tensor.locate(error))
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
