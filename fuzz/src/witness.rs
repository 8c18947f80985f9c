//! What verification must find, written anew from spec/format.md: slow, and on top of the reference
//! decoder. It knows neither hashes nor JSON.

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

use crate::tile;

/// Why a container or a tensor does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A rule is broken.
    Corrupt(&'static str),
    /// No rule that can be checked is broken, but there is a tensor of unknown dtype or encoding.
    Unsupported,
}

type Result<T = ()> = std::result::Result<T, Failure>;

fn require(holds: bool, rule: &'static str) -> Result {
    if holds { Ok(()) } else { Err(Failure::Corrupt(rule)) }
}

/// Checks the arrays of a `gap` tensor (section 6.3): all that the reference decoder checks, LUTs,
/// gaps, output offsets and the zeros from `bit_count` on.
///
/// # Errors
/// [`Failure::Corrupt`] at the first broken rule.
pub fn verify_gap(arrays: [&[u8]; 5], parameters: [u64; 3]) -> Result {
    let weights = df11_reference::decode_gap(arrays, parameters)
        .map_err(|error| Failure::Corrupt(error.message))?;
    let [codebook, gaps, output_offsets, bitstream, _] = arrays;
    let (lengths, luts) = codebook.split_first_chunk::<256>().expect("the reference read them");
    require(luts == df11_reference::luts(lengths), "LUTs")?;
    let exponents = weights.chunks_exact(2).map(|weight| weight[1] << 1 | weight[0] >> 7);
    let (expected_gaps, expected_offsets) =
        index(exponents.map(|exponent| lengths[usize::from(exponent)]), parameters);
    require(gaps == expected_gaps, "gaps")?;
    require(output_offsets == expected_offsets, "output offsets")?;
    require(zeros_after(bitstream, parameters[2]), "zeros from bit_count on")
}

/// Checks the arrays of a `tile` tensor (section 6.4): all that the reference decoder checks and,
/// by coding its weights again, what is left to verification: zeros after lanes, tiles and
/// `bit_count`, no pair escaped that has a code, `least` and `shift`.
///
/// # Errors
/// [`Failure::Corrupt`] at the first broken rule.
pub fn verify_tile(arrays: [&[u8]; 4], parameters: [u64; 3]) -> Result {
    let weights = df11_reference::decode_tile(arrays, parameters)
        .map_err(|error| Failure::Corrupt(error.message))?;
    let [codebook, records, bitstream, plane] = arrays;
    let [tile_columns, columns, bit_count] = parameters;
    let again = tile::encode(&weights, codebook, [tile_columns, columns], |_| false);
    require(plane == again.plane, "order of the plane")?;
    require(bit_count == again.parameters[2], "bits of lanes, or an escaped pair with a code")?;
    require(records == again.records, "records")?;
    require(
        bitstream == again.bitstream,
        "zeros after lanes, tiles and bit_count, or an escaped pair with a code",
    )
}

/// Whether all bits from `bit` on are zero.
pub fn zeros_after(bitstream: &[u8], bit: u64) -> bool {
    (bit..8 * bitstream.len() as u64).all(|bit| bitstream[(bit / 8) as usize] >> (bit % 8) & 1 == 0)
}

/// Gaps and output offsets of a tensor whose codes have these lengths.
fn index(code_lengths: impl Iterator<Item = u8>, parameters: [u64; 3]) -> (Vec<u8>, Vec<u8>) {
    let [bytes_per_thread, threads_per_block, bit_count] = parameters;
    let threads = bit_count.div_ceil(8 * bytes_per_thread);
    let (mut gaps, mut output_offsets) = (vec![0; threads.div_ceil(2) as usize], Vec::new());
    let (mut position, mut element, mut thread) = (0, 0u64, 0);
    for length in code_lengths.chain([0]) {
        // `position` is a boundary: for the threads that start at or before it, and after the last
        // one, the first.
        while thread < threads && 8 * bytes_per_thread * thread <= position {
            let gap = (position - 8 * bytes_per_thread * thread) as u8;
            gaps[(thread / 2) as usize] |= gap << (thread % 2 * 4);
            if thread.is_multiple_of(threads_per_block) {
                output_offsets.extend(element.to_le_bytes());
            }
            thread += 1;
        }
        (position, element) = (position + u64::from(length), element + 1);
    }
    output_offsets.extend((element - 1).to_le_bytes());
    (gaps, output_offsets)
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
    for (index, file) in
        directory.files.iter().enumerate().filter(|(_, file)| file.kind == FILE_WEIGHTS)
    {
        let prefix =
            directory.arrays[file.array_range()].iter().map(|array| array.length.get()).sum();
        cover(directory, index as u64, prefix, file.length.get())?;
    }
    if all_known { Ok(()) } else { Err(Failure::Unsupported) }
}

fn is_known(directory: &Directory, tensor: &TensorRecord) -> bool {
    let known = |tensor: &TensorRecord| {
        [ENCODING_RAW, ENCODING_GAP, ENCODING_TILE].contains(&tensor.encoding.get())
    };
    Dtype::from_id(tensor.dtype.get()).is_some()
        && match tensor.encoding.get() {
            ENCODING_ALIAS => known(&directory.tensors[tensor.parameters[0].get() as usize]),
            _ => known(tensor),
        }
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
        places.push((
            tensor.file_offset.get(),
            dtype.bytes(&tensor.dimensions()).expect("a valid shape"),
        ));
    }
    places.sort_unstable();
    let mut end = prefix;
    for (start, bytes) in places {
        require(start == end, "an overlap or a hole")?;
        end += bytes;
    }
    require(end == length, "the end of a file")
}
