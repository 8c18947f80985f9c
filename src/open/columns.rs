//! Decoding of slices, on all threads.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    PreparedTensor,
    decoder::ranges,
    reader::{PIECE_BYTES, TensorReader},
    slice::{Rect, Slice},
};
use crate::{Result, parallel};

/// What one thread decodes at once.
enum ThreadWork {
    /// Columns of some rows, without the others.
    Columns(Rect),
    /// Columns of some rows, out of whole rows: where codes have no columns, each row alone would
    /// decode its neighbours too.
    OfWholeRows(Rect),
    /// A range of the tensor's bytes.
    Run(Range<u64>),
}

impl ThreadWork {
    fn bytes(&self) -> u64 {
        match self {
            Self::Columns(rect) | Self::OfWholeRows(rect) => rect.bytes(),
            Self::Run(range) => range.end - range.start,
        }
    }

    fn read(&self, tensor: &TensorReader<'_>, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Columns(rect) => tensor.read_rect(rect, out),
            Self::OfWholeRows(Rect { rows, columns, width }) => {
                let mut whole = vec![0; ((rows.end - rows.start) * width) as usize];
                tensor.read(rows.start * width..rows.end * width, &mut whole)?;
                let wanted = columns.start as usize..columns.end as usize;
                let rows = whole.chunks(*width as usize).zip(out.chunks_mut(wanted.len()));
                rows.for_each(|(row, out)| out.copy_from_slice(&row[wanted.clone()]));
                Ok(())
            }
            Self::Run(range) => tensor.read(range.clone(), out),
        }
    }
}

/// Decodes a slice into as many bytes.
pub(super) fn read_slice(tensor: &TensorReader<'_>, slice: &Slice, out: &mut [u8]) -> Result<()> {
    let parts: Vec<ThreadWork> = slice.rects().flat_map(|rect| parts(tensor, rect)).collect();
    let outs: Vec<_> = parallel::split(out, parts.iter().map(ThreadWork::bytes)).collect();
    parts.into_par_iter().zip(outs).try_for_each(|(part, out)| part.read(tensor, out))
}

/// Cuts a rect into parts of about [`PIECE_BYTES`].
fn parts(tensor: &TensorReader<'_>, rect: Rect) -> Vec<ThreadWork> {
    let rows = |row_bytes: u64, grain: u64| {
        let Rect { rows, columns, width } = rect.clone();
        parallel::cut(rows, PIECE_BYTES / row_bytes, grain).map(move |rows| Rect {
            rows,
            columns: columns.clone(),
            width,
        })
    };
    if rect.rows.end - rect.rows.start > 1 {
        if let Some(grain) = tensor.grain_rows(rect.width) {
            return rows(rect.columns.end - rect.columns.start, grain)
                .map(ThreadWork::Columns)
                .collect();
        }
        if rect.width <= PIECE_BYTES {
            return rows(rect.width, 1).map(ThreadWork::OfWholeRows).collect();
        }
    }
    let grain = tensor.grain();
    rect.runs().flat_map(|run| ranges(run, grain)).map(ThreadWork::Run).collect()
}
