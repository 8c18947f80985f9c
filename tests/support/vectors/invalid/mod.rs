//! Containers that every reader must reject, each for one reason; all checksums are right unless
//! they are the reason.

mod content;
mod edges;
mod encodings;
mod frame;
mod json;
mod names;
mod sections;
mod tensors;
mod tile;

use df11::Dtype;

use super::Vector;
use crate::container::{Draft, Item, Model, normal_weights};

pub(super) fn vectors() -> Vec<Vector> {
    [
        frame::frame(),
        frame::lists(),
        names::text(),
        names::metadata(),
        names::beside(),
        names::files(),
        sections::sections(),
        tensors::tensors(),
        tensors::arrays(),
        encodings::aliases(),
        encodings::encodings(),
        encodings::index(),
        encodings::codes(),
        content::content(),
        content::weights_files(),
        content::headers(),
        content::neighbours(),
        tile::vectors(),
        edges::names(),
        edges::sections(),
        edges::aliases(),
        edges::gap(),
        edges::tile(),
        json::syntax(),
        json::shapes(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

const LIMIT: &[&str] = &["Limit"];
const UNSUPPORTED: &[&str] = &["Unsupported"];
/// Where arithmetic overflows, a reader has the choice.
const OVERFLOW: &[&str] = &["Limit", "Corrupt"];

const HUGE: u64 = u64::MAX;

/// A vector that must not open. Those below are its usual ways to be made.
fn open(name: &str, about: &str, bytes: Vec<u8>) -> Vector {
    Vector::invalid(name, "open", about, bytes)
}

/// The plain model, laid out and then edited.
fn of_draft(name: &str, about: &str, edit: impl FnOnce(&mut Draft)) -> Vector {
    open(name, about, edited(edit))
}

/// The plain model, edited before it is laid out.
fn of_model(name: &str, about: &str, edit: impl FnOnce(&mut Model)) -> Vector {
    open(name, about, remade(plain(), edit))
}

/// Two raw tensors and a side file, in three sections.
fn plain() -> Model {
    let items = [
        Item::raw("a", Dtype::U8, &[5], vec![1, 2, 3, 4, 5]),
        Item::raw("bé", Dtype::F32, &[2], (10..18).collect()),
    ];
    Model::new(&items, &[("config.json", b"{}\n")])
}

/// A coded tensor of three thread blocks and an odd number of threads, and one stored raw.
fn coded() -> Model {
    let odd = |count: &usize| {
        let bits = crate::container::encode(&normal_weights(*count, 21), 8, 64).1[2];
        bits.div_ceil(64) % 2 == 1 && !bits.is_multiple_of(64)
    };
    let count = (4500..5000).find(odd).unwrap();
    let weights = normal_weights(count, 21);
    Model::new(
        &[
            Item::gap("w", &[count as u64], weights, (8, 64)),
            Item::raw("x", Dtype::U8, &[3], vec![7; 3]),
        ],
        &[],
    )
}

fn edited(edit: impl FnOnce(&mut Draft)) -> Vec<u8> {
    edited_of(&plain(), edit)
}

fn edited_of(model: &Model, edit: impl FnOnce(&mut Draft)) -> Vec<u8> {
    let mut draft = model.draft();
    edit(&mut draft);
    draft.pack()
}

/// The model edited, with hashes that fit.
fn remade(mut model: Model, edit: impl FnOnce(&mut Model)) -> Vec<u8> {
    edit(&mut model);
    model.build()
}
