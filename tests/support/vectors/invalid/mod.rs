//! Containers that every reader must reject, each for one reason; all checksums are right unless
//! they are the reason. Most are one edit of one good container: tables of names and edits.

mod directory;
mod files;
mod float;
mod frame;
mod gap;
mod headers;
mod tile;

use df11::{Dtype, hazmat::format::Directory};

use super::Vectors;
use crate::container::{Draft, Item, Model, Tensor};

const HUGE: u64 = u64::MAX;

pub(super) fn make(to: &mut Vectors) {
    frame::make(to);
    files::make(to);
    directory::make(to);
    gap::make(to);
    tile::make(to);
    float::make(to);
    headers::make(to);
}

/// Names, and what is changed for each.
type Edits<'a, T> = &'a [(&'a str, fn(&mut T))];

/// A model of which some vectors are made, each by one change.
struct Base<'a> {
    to: &'a mut Vectors,
    model: &'a Model,
    /// The tensor that is changed.
    tensor: usize,
}

impl Vectors {
    fn of<'a>(&'a mut self, model: &'a Model) -> Base<'a> {
        Base { to: self, model, tensor: 0 }
    }
}

impl Base<'_> {
    /// The model, edited before it is laid out.
    fn models(self, edits: Edits<'_, Model>) {
        for (name, edit) in edits {
            let mut model = self.model.clone();
            edit(&mut model);
            self.to.invalid(name, model.build());
        }
    }

    fn at(self, tensor: usize) -> Self {
        Self { tensor, ..self }
    }

    /// The same for one tensor, the first one unless told.
    fn tensors(self, edits: Edits<'_, Tensor>) {
        for (name, edit) in edits {
            let mut model = self.model.clone();
            edit(&mut model.tensors[self.tensor]);
            self.to.invalid(name, model.build());
        }
    }

    /// The model laid out, with its directory edited.
    fn directories(self, edits: Edits<'_, Directory>) {
        for (name, edit) in edits {
            let mut draft = self.model.draft();
            edit(&mut draft.directory);
            self.to.invalid(name, draft.pack());
        }
    }

    /// The model laid out and edited, and its checksums made right.
    fn drafts(self, edits: Edits<'_, Draft>) {
        for (name, edit) in edits {
            let mut draft = self.model.draft();
            edit(&mut draft);
            draft.repair_checksums();
            self.to.invalid(name, draft.pack());
        }
    }

    /// The model laid out, with a bit of a section flipped.
    fn flipped(self, name: &str, section: usize, byte: usize) {
        let mut draft = self.model.draft();
        draft.contents[section][byte] ^= 1;
        self.to.invalid(name, draft.pack());
    }
}

/// Two raw tensors and a side file. Sections: raw in block 0, prefix, side; arrays: prefix, side,
/// a, bé.
fn plain() -> Model {
    let items = [
        Item::raw("a", Dtype::U8, &[5], vec![1, 2, 3, 4, 5]),
        Item::raw("bé", Dtype::F32, &[2], (10..18).collect()),
    ];
    Model::new(&items, &[("config.json", b"{}\n")])
}

/// The model with more sections: block, kind, bytes.
fn with_section(mut model: Model, block: u64, kind: u32, bytes: &[u8]) -> Model {
    model.extra_sections.push((block, kind, bytes.into()));
    model
}

fn shorten(bytes: &mut Vec<u8>, by: usize) {
    bytes.truncate(bytes.len() - by);
}
