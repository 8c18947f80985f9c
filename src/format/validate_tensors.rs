//! The rules of tensors and their encodings (spec/format.md, sections 3, 5 and 6).

use super::{
    coded::{Coded, section_of},
    records::{ENCODING_ALIAS, ENCODING_RAW, FILE_WEIGHTS, SECTION_RAW, TensorRecord},
    validate::Check,
};
use crate::{
    Dtype, Error, Result,
    constants::{MAX_ALIASES, MAX_DIMENSIONS},
    dtype::elements,
};

const WRONG_ARRAYS: &str = "its arrays are not those of its encoding";

impl Check<'_> {
    /// All tensors, after their names, files, blocks, sections and arrays.
    pub(super) fn tensors(&self) -> Result<()> {
        let mut before = None;
        let mut aliases = vec![0; self.directory.tensors.len()];
        for (i, tensor) in self.directory.tensors.iter().enumerate() {
            let name = self.directory.tensor_name(tensor);
            let ascends = before.is_none_or(|before| before < name.as_bytes());
            self.require(i, ascends, "names are not ascending")?;
            before = Some(name.as_bytes());
            self.tensor(i, tensor)?;
            if tensor.encoding == ENCODING_ALIAS {
                self.count_alias(tensor, &mut aliases)?;
            }
        }
        Ok(())
    }

    /// One alias more of a target that `alias` accepted.
    fn count_alias(&self, tensor: &TensorRecord, aliases: &mut [u64]) -> Result<()> {
        let count = &mut aliases[tensor.parameters[0].get() as usize];
        *count += 1;
        let name = self.directory.tensor_name(tensor);
        let what = format_args!("the number of aliases of the target of tensor {name:?}");
        Error::check_limit(what, *count, MAX_ALIASES)
    }

    fn tensor(&self, i: usize, tensor: &TensorRecord) -> Result<()> {
        let dimensions = tensor.dimension_count.get();
        Error::check_limit("a tensor's number of dimensions", dimensions, MAX_DIMENSIONS)?;
        let is_zero = tensor.shape[dimensions as usize..].iter().all(|&dimension| dimension == 0);
        self.require(i, is_zero, "a dimension beyond dimension_count is not zero")?;
        let has_block = tensor.block.get() < self.directory.blocks.len() as u64;
        self.require(i, has_block, "its block does not exist")?;
        let file = usize::try_from(tensor.file.get())
            .ok()
            .and_then(|file| self.directory.files.get(file))
            .filter(|file| file.kind.get() == FILE_WEIGHTS)
            .ok_or_else(|| self.tensor_corrupt(i, "its weights file does not exist"))?;
        let dtype = Dtype::from_id(tensor.dtype.get());
        let shape = tensor.dimensions();
        let bytes = match dtype.map(|dtype| dtype.bytes(&shape)) {
            // Nothing is known of the size of its elements.
            None => 0,
            Some(Err(Error::Parameter { problem, .. })) => {
                return Err(self.tensor_corrupt(i, problem));
            }
            Some(bytes) => bytes?,
        };
        let end = tensor.file_offset.get().checked_add(bytes);
        let is_inside = end.is_some_and(|end| end <= file.length.get());
        self.require(i, is_inside, "it ends beyond its weights file")?;
        if tensor.encoding == ENCODING_ALIAS {
            return self.alias(i, tensor);
        }
        let Some(dtype) = dtype else { return Ok(()) };
        match tensor.encoding.get() {
            ENCODING_RAW => self.raw(i, tensor, bytes),
            encoding if Coded::is_coded(encoding) => {
                self.coded(i, tensor, dtype, elements(&shape)?)
            }
            _ => Ok(()),
        }
    }

    fn alias(&self, i: usize, tensor: &TensorRecord) -> Result<()> {
        self.parameters(i, tensor, 1)?;
        self.array_kinds(i, tensor, &[], &[])?;
        let target = usize::try_from(tensor.parameters[0].get())
            .ok()
            .and_then(|target| self.directory.tensors.get(target))
            .ok_or_else(|| self.tensor_corrupt(i, "the target of the alias does not exist"))?;
        let same = target.encoding.get() != ENCODING_ALIAS
            && target.block == tensor.block
            && target.dtype == tensor.dtype
            && target.dimension_count == tensor.dimension_count
            && target.shape == tensor.shape
            && target.hash == tensor.hash;
        self.require(i, same, "the target of the alias is not its equal")
    }

    fn raw(&self, i: usize, tensor: &TensorRecord, bytes: u64) -> Result<()> {
        self.parameters(i, tensor, 0)?;
        if bytes == 0 {
            self.array_kinds(i, tensor, &[], &[])
        } else {
            self.array_kinds(i, tensor, &[SECTION_RAW], &[bytes])
        }
    }

    fn coded(&self, i: usize, tensor: &TensorRecord, dtype: Dtype, count: u64) -> Result<()> {
        self.parameters(i, tensor, 3)?;
        let is_codable = dtype == Dtype::BF16 && count > 0;
        self.require(i, is_codable, "only BF16 tensors with elements can be coded")?;
        // The plane first: once it is known to be there, no other size can be large for nothing.
        let plane = self.directory.arrays[tensor.array_range()].last();
        self.require(i, plane.is_some_and(|plane| plane.length == count), WRONG_ARRAYS)?;
        let sizes = Coded::of(self.directory, tensor).map_err(|error| match error {
            limit @ Error::Limit { .. } => limit,
            error => self.tensor_corrupt(i, error),
        })?;
        let arrays = sizes.expect("a coded tensor").arrays();
        let (kinds, lengths): (Vec<u32>, Vec<u64>) =
            arrays.into_iter().map(|(kind, length)| (section_of(kind), length)).unzip();
        self.array_kinds(i, tensor, &kinds, &lengths)
    }

    /// The parameters from `used` on are zero.
    fn parameters(&self, i: usize, tensor: &TensorRecord, used: usize) -> Result<()> {
        let is_zero = tensor.parameters[used..].iter().all(|&parameter| parameter == 0);
        self.require(i, is_zero, "an unused parameter is not zero")
    }

    /// The arrays are in sections of these kinds and have these lengths in bytes.
    fn array_kinds(
        &self,
        i: usize,
        tensor: &TensorRecord,
        kinds: &[u32],
        lengths: &[u64],
    ) -> Result<()> {
        let arrays = &self.directory.arrays[tensor.array_range()];
        let right = arrays.len() == kinds.len()
            && arrays.iter().zip(kinds).all(|(array, &kind)| self.section_of(array).kind == kind)
            && arrays.iter().zip(lengths).all(|(array, &length)| array.length == length);
        self.require(i, right, WRONG_ARRAYS)
    }
}
