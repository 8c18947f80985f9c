//! Opening: the cost grows with the number of tensors, and not with their size.

#[path = "../tests/support/container.rs"]
mod container;

use std::{fs, hint::black_box, path::Path};

use container::{File, Item, Model, Tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use df11::{
    Dtype, OpenOptions,
    hazmat::format::records::{ENCODING_GAP, SECTION_BITSTREAM},
};

/// A container of `tensors` coded tensors with names and blocks as those of a mixture of experts,
/// and its path.
///
/// Each has the arrays of a coded tensor of a few weights; the data's size does not matter, as the
/// second benchmark shows.
fn write(folder: &Path, tensors: usize, weights: usize) -> std::path::PathBuf {
    let data = container::normal_weights(weights, 1);
    let item = Item::gap("w", &[weights as u64], data, (16, 256));
    let one = Model::new(&[item], &[]);
    let stored: &Tensor = &one.tensors[0];
    let per_block = 100;
    let mut model = Model::new(&[Item::raw("w", Dtype::U8, &[0], vec![])], &[]);
    model.blocks = (0..tensors.div_ceil(per_block))
        .map(|at| format!("model.layers.{at}").into_bytes())
        .collect();
    model.tensors = (0..tensors)
        .map(|at| Tensor {
            name: format!(
                "model.layers.{:05}.mlp.experts.{:03}.down_proj.weight",
                at / per_block,
                at % per_block
            )
            .into(),
            block: (at / per_block) as u64,
            ..stored.clone()
        })
        .collect();
    assert!(stored.encoding == ENCODING_GAP && stored.arrays[3].0 == SECTION_BITSTREAM);
    let file: &mut File = &mut model.files[0];
    file.length = 1 << 40;
    let path = folder.join(format!("{tensors}.{weights}.df11"));
    fs::write(&path, model.build()).unwrap();
    path
}

fn open(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    for (tensors, weights) in [(1000, 8), (1000, 20_000), (100_000, 8)] {
        let path = write(folder.path(), tensors, weights);
        for (backend, memory_map) in [("map", true), ("read", false)] {
            let options = OpenOptions::new().memory_map(memory_map);
            let name = format!("open/{tensors} tensors of {weights} weights/{backend}");
            criterion.bench_function(&name, |bencher| {
                bencher.iter(|| black_box(options.open(&path).unwrap()));
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = open
}
criterion_main!(benches);
