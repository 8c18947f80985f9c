//! What verification must find in a container, written anew from spec/format.md. It knows neither
//! hashes nor JSON; arrays of coded tensors are judged by `array_witness`.

use df11::{
    Dtype,
    hazmat::{
        constants::{CHECKSUM_CHUNK_BYTES, HEAD_BYTES},
        format::{
            Directory,
            records::{
                ENCODING_ALIAS, ENCODING_GAP, ENCODING_RAW, ENCODING_TILE, FILE_WEIGHTS,
                TensorRecord,
            },
        },
    },
};

use crate::array_witness::{verify_gap, verify_tile};

/// Why a container or a tensor does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A rule is broken.
    Corrupt(&'static str),
    /// No rule that can be checked is broken, but there is a tensor of unknown dtype or encoding.
    Unsupported,
}

impl From<&'static str> for Failure {
    fn from(rule: &'static str) -> Self {
        Self::Corrupt(rule)
    }
}

type Result<T = ()> = std::result::Result<T, Failure>;

fn require(holds: bool, rule: &'static str) -> Result {
    if holds { Ok(()) } else { Err(Failure::Corrupt(rule)) }
}

/// Checks a container whose directory is valid: checksums, zeros, coded tensors, and that tensors
/// cover their files.
///
/// # Errors
/// [`Failure::Corrupt`] at the first broken rule; [`Failure::Unsupported`] if there is none.
pub fn verify(container: &[u8], directory: &Directory) -> Result {
    checksums(container, directory)?;
    zeros(container, directory)?;
    let mut all_known = true;
    for tensor in &directory.tensors {
        all_known &= is_known(directory, tensor);
        if Dtype::from_id(tensor.dtype.get()).is_some() {
            let arrays = arrays(container, directory, tensor);
            match tensor.encoding.get() {
                ENCODING_GAP => verify_gap(arrays, parameters(tensor))?,
                ENCODING_TILE => {
                    let [codebook, records, bitstream, plane, _] = arrays;
                    verify_tile([codebook, records, bitstream, plane], parameters(tensor))?;
                }
                _ => {}
            }
        }
    }
    for (index, file) in (0..).zip(&directory.files) {
        if file.kind == FILE_WEIGHTS {
            let prefix = directory.arrays[file.array_range()][0].length.get();
            cover(directory, index, prefix, file.length.get())?;
        }
    }
    if all_known { Ok(()) } else { Err(Failure::Unsupported) }
}

fn is_known(directory: &Directory, tensor: &TensorRecord) -> bool {
    let source = match tensor.encoding.get() {
        ENCODING_ALIAS => &directory.tensors[tensor.parameters[0].get() as usize],
        _ => tensor,
    };
    let known = [ENCODING_RAW, ENCODING_GAP, ENCODING_TILE];
    Dtype::from_id(tensor.dtype.get()).is_some() && known.contains(&source.encoding.get())
}

fn parameters(tensor: &TensorRecord) -> [u64; 3] {
    std::array::from_fn(|parameter| tensor.parameters[parameter].get())
}

fn arrays<'a>(container: &'a [u8], directory: &Directory, tensor: &TensorRecord) -> [&'a [u8]; 5] {
    let mut arrays = [&[] as &[u8]; 5];
    for (bytes, array) in arrays.iter_mut().zip(&directory.arrays[tensor.array_range()]) {
        let section = &directory.sections[array.section.get() as usize];
        let start = (section.offset.get() + array.offset.get()) as usize;
        *bytes = &container[start..start + array.length.get() as usize];
    }
    arrays
}

fn checksums(container: &[u8], directory: &Directory) -> Result {
    let chunks = directory.sections.iter().flat_map(|section| {
        container[section.offset.get() as usize..section.end() as usize]
            .chunks(CHECKSUM_CHUNK_BYTES as usize)
    });
    let mut pairs = chunks.zip(&directory.checksums);
    require(pairs.all(|(chunk, checksum)| crc32fast::hash(chunk) == checksum.get()), "checksums")
}

/// The zeros between sections and between arrays.
fn zeros(container: &[u8], directory: &Directory) -> Result {
    let are_zero = |start: u64, end: u64| {
        container[start as usize..end as usize].iter().all(|&byte| byte == 0)
    };
    let mut end = HEAD_BYTES;
    let mut ends = Vec::new();
    for section in &directory.sections {
        require(are_zero(end, section.offset.get()), "zeros between sections")?;
        end = section.end();
        ends.push(section.offset.get());
    }
    // The directory is the next thing on a multiple of the alignment.
    require(are_zero(end, end.next_multiple_of(4096)), "zeros before the directory")?;
    for array in &directory.arrays {
        let section = array.section.get() as usize;
        let start = directory.sections[section].offset.get() + array.offset.get();
        require(are_zero(ends[section], start), "zeros between arrays")?;
        ends[section] = start + array.length.get();
    }
    Ok(())
}

/// Tensors follow each other from the prefix to the end of their file; not known where a dtype is
/// not.
fn cover(directory: &Directory, file: u64, prefix: u64, length: u64) -> Result {
    let mut places = Vec::new();
    for tensor in directory.tensors.iter().filter(|tensor| tensor.file == file) {
        let Some(dtype) = Dtype::from_id(tensor.dtype.get()) else { return Ok(()) };
        let bytes = dtype.bytes(&tensor.dimensions()).expect("a valid shape");
        places.push((tensor.file_offset.get(), bytes));
    }
    places.sort_unstable();
    let mut end = prefix;
    for (start, bytes) in places {
        require(start == end, "an overlap or a hole")?;
        end += bytes;
    }
    require(end == length, "the end of a file")
}
