//! Everything that can be done with an open model.

use std::{io, ops::Range, path::PathBuf};

use df11::{Encoding, Error, Level, Model, OpenOptions, ReadAt, Result, Tensor, hazmat::histogram};
use df11_reference::Kind;

/// The largest buffer for a whole block that is asked for, in bytes; aliases let a small file ask
/// for a large one.
const LARGEST_BLOCK: u64 = 16 << 20;

/// Bytes that are read like a file's: no views.
pub struct Copied(pub Vec<u8>);

impl ReadAt for Copied {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(offset, buf)
    }
}

/// Opens containers from memory.
///
/// # Errors
/// The errors of [`OpenOptions::open_readers`].
pub fn open(containers: &[&[u8]], options: &OpenOptions) -> Result<Model> {
    let reader = |(index, bytes): (usize, &&[u8])| -> (PathBuf, Box<dyn ReadAt>) {
        (format!("{index}.df11").into(), Box::new(bytes.to_vec()))
    };
    options.open_readers(containers.iter().enumerate().map(reader).collect())
}

/// Opens one container from memory, reading it as a file without a mapping.
///
/// # Errors
/// The errors of [`OpenOptions::open_readers`].
pub fn open_copied(container: &[u8], options: &OpenOptions) -> Result<Model> {
    options.open_readers(vec![("0.df11".into(), Box::new(Copied(container.to_vec())))])
}

/// Checks that an error blames a damaged or newer file, and neither the caller nor the system.
pub fn assert_typed(error: &Error) {
    let typed =
        matches!(error, Error::Corrupt { .. } | Error::Limit { .. } | Error::Unsupported { .. });
    assert!(typed, "{error:?}");
    let line = error.to_string();
    assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
}

/// Both accept, or both report errors of one kind, where Limit and Corrupt count as one.
pub fn assert_agreement<T, U>(ours: &Result<T>, theirs: &df11_reference::Result<U>) {
    match (ours, theirs) {
        (Ok(_), Ok(_)) => {}
        (Err(ours), Err(theirs)) => {
            assert_typed(ours);
            let is_unsupported = matches!(ours, Error::Unsupported { .. });
            assert_eq!(is_unsupported, theirs.kind == Kind::Unsupported, "{ours} / {theirs}");
        }
        (Ok(_), Err(theirs)) => panic!("only df11 accepts; the reference: {theirs}"),
        (Err(ours), Ok(_)) => panic!("only the reference accepts; df11: {ours}"),
    }
}

fn typed<T>(result: Result<T>) -> Option<T> {
    result.inspect_err(assert_typed).ok()
}

/// Calls whatever there is on a model. Everything gives bytes or a typed error.
pub fn exercise(model: &Model) {
    for tensor in model.tensors() {
        assert_eq!(model.tensor(tensor.name()).expect("it is there").name(), tensor.name());
        exercise_tensor(&tensor);
    }
    for block in model.blocks() {
        let found = model.block(block.name()).expect("it is there");
        assert_eq!(found.stored_bytes(), block.stored_bytes());
        let Some(layout) = typed(block.layout()).filter(|layout| layout.bytes <= LARGEST_BLOCK)
        else {
            continue;
        };
        let mut buffer = vec![0xAA; layout.bytes as usize];
        if typed(block.decode_into(&mut buffer)).is_some() {
            for (tensor, range) in block.tensors().zip(&layout.tensors) {
                assert_eq!(range.start % 256, 0);
                let alone = tensor.decode::<u8>().expect("it decoded in its block");
                assert!(buffer[range.start as usize..range.end as usize] == alone);
            }
        }
    }
    for level in [Level::Structure, Level::Checksums, Level::Full] {
        typed(model.verify(level, &()));
    }
}

fn exercise_tensor(tensor: &Tensor<'_>) {
    let whole = typed(tensor.decode::<u8>());
    let (shape, encoding) = (tensor.shape(), tensor.encoding());
    let _ = (tensor.elements(), tensor.bits_per_element(), tensor.hash(), tensor.block_name());
    let _ = tensor.target().name();
    assert!(whole.is_none() || !matches!(encoding, Encoding::Unknown(_)));
    if tensor.dtype() == Some(df11::Dtype::BF16) {
        let weights = typed(tensor.decode::<half::bf16>());
        let histogram = typed(histogram(tensor));
        assert_eq!(weights.is_some(), whole.is_some());
        // A piece at a time finds what decoding as a whole finds.
        assert_eq!(histogram.is_some(), whole.is_some());
    }
    let Some(whole) = whole else { return };
    let rows = shape.first().copied().unwrap_or(1);
    let range = rows / 3..rows.div_ceil(2);
    if rows == 0 || !(whole.len() as u64).is_multiple_of(rows) {
        return;
    }
    let row = whole.len() / rows as usize;
    let bytes = range.start as usize * row..range.end as usize * row;
    check_slice(tensor, std::slice::from_ref(&range), &whole[bytes]);
    check_columns(tensor, &shape, &whole, range);
}

/// Some columns of some rows of a matrix of whole bytes are what lies there in the whole.
fn check_columns(tensor: &Tensor<'_>, shape: &[u64], whole: &[u8], rows: Range<u64>) {
    let &[height, width] = shape else { return };
    let each = whole.len() as u64 / (height * width).max(1);
    if each == 0 || each * height * width != whole.len() as u64 {
        return;
    }
    let columns = width / 4..width - width / 3;
    let wanted = (columns.start * each) as usize..(columns.end * each) as usize;
    let rows_of_it = whole.chunks((width * each) as usize).take(rows.end as usize);
    let expected = rows_of_it.skip(rows.start as usize).map(|row| &row[wanted.clone()]);
    let expected = expected.collect::<Vec<_>>().concat();
    check_slice(tensor, &[rows, columns], &expected);
}

fn check_slice(tensor: &Tensor<'_>, ranges: &[Range<u64>], expected: &[u8]) {
    let mut part = vec![0xAA; expected.len()];
    tensor
        .slice(ranges)
        .and_then(|slice| slice.decode_into(&mut part))
        .expect("a slice of what decodes");
    assert!(part == expected);
}
