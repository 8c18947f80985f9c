//! Decode tables of the tensors on a GPU.

use std::collections::HashMap;

use cudarc::driver::sys::CUdeviceptr;

use super::{
    Device,
    coding::{CODINGS, KernelEncoding},
    memory::Buffer,
    needs::TensorId,
    stored::Tensors,
    task::TableTask,
};
use crate::Result;

/// Where a codebook begins, while tables are made.
const CODEBOOK_ALIGNMENT: usize = 16;

/// Device addresses of decode tables.
pub(super) type Tables = HashMap<TensorId, CUdeviceptr>;

/// Device memory for decode tables, of any content yet; none for no tensor.
pub(super) fn allocate_tables(
    device: &Device,
    coded: impl Iterator<Item = (TensorId, KernelEncoding)>,
) -> Result<Option<(Buffer, Tables)>> {
    let coded: Vec<(TensorId, KernelEncoding)> = coded.collect();
    if coded.is_empty() {
        return Ok(None);
    }
    let bytes = coded.iter().map(|(_, coding)| coding.table_bytes()).sum();
    let memory = device.allocate(bytes, "the model's decode tables")?;
    let mut next = memory.pointer();
    let place = |(tensor, coding): (TensorId, KernelEncoding)| {
        let at = next;
        next += coding.table_bytes();
        (tensor, at)
    };
    let tables = coded.into_iter().map(place).collect();
    Ok(Some((memory, tables)))
}

/// Builds decode tables, and waits.
pub(super) fn build_tables(device: &Device, tables: &Tables, stored: &Tensors) -> Result<()> {
    let stream = device.copies();
    for coding in CODINGS {
        let (mut codebooks, mut tasks) = (Vec::new(), Vec::new());
        for (tensor, &table) in tables {
            let coded = stored[tensor].coded().expect("coded tensors have tables");
            if coded.coding() != coding {
                continue;
            }
            let (codebook, bytes) = (codebooks.len() as u64, coded.codebook().len() as u64);
            tasks.push(TableTask { codebook, table, codebook_bytes: bytes });
            codebooks.extend(coded.codebook());
            codebooks.resize(codebooks.len().next_multiple_of(CODEBOOK_ALIGNMENT), 0);
        }
        if tasks.is_empty() {
            continue;
        }
        let codebooks = Buffer::of(stream, &codebooks)?;
        for task in &mut tasks {
            task.codebook += codebooks.pointer();
        }
        let tasks = Buffer::of(stream, &tasks)?;
        device.kernels().build_tables(coding, stream, &tasks)?;
    }
    Ok(())
}
