//! Valid containers at the edges of the rules: limits that are just kept, and what is free.

use df11::Dtype;

use super::Vector;
use crate::container::{File, Item, Model, with_length};

pub(super) fn vectors() -> Vec<Vector> {
    vec![path_limits(), path_characters(), header_edges(), unknown_dtype(), unknown_aliases()]
}

fn one() -> Item {
    Item::raw("x", Dtype::U8, &[3], vec![1, 2, 3])
}

fn whole(name: &str, about: &str, model: &Model) -> Vector {
    Vector::valid(name, about, model, model.build(), |_| false)
}

/// 9999 files beside the container, whose paths name this many folders; one hash for all, so that
/// the vector stays small.
pub(super) fn many_files(folders: usize) -> Model {
    let mut model = Model::new(&[one()], &[]);
    let files = 9999;
    let path = |at: usize| {
        let inner = if at < folders - files { "f/x" } else { "x" };
        format!("{at:04}/{inner}")
    };
    let file = |at| File { hash: [0; 32], ..File::beside(&path(at), b"") };
    model.files.extend((0..files).map(file));
    model.identity = model.identity_of_files();
    model
}

fn path_limits() -> Vector {
    whole("path-limits", "exactly 10000 files, and exactly 10000 folders", &many_files(10_000))
}

fn path_characters() -> Vector {
    let items = [one(), Item::raw("y", Dtype::U8, &[1], vec![9]).in_file("weights.df11")];
    let side: [(&str, &[u8]); 3] =
        [("model.df11", b"stored"), ("\u{a0}\u{ad}\u{2028}", b"no controls"), ("~ ", b"~")];
    let about = "the characters next to the control characters; a weights file and a stored file \
    that end in .df11";
    whole("path-characters", about, &Model::new(&items, &side))
}

/// Arrays 98 deep within two objects, a surrogate pair, and the largest numbers.
fn header_edges() -> Vector {
    let mut model = Model::new(&[Item::raw("🗝", Dtype::U8, &[3], vec![1, 2, 3])], &[]);
    let (open, close) = ("[".repeat(98), "]".repeat(98));
    let before = model.files[0].arrays[0].1.len() as u64;
    let prefix = with_length(&format!(
        "{{\"\\ud83d\\uddDD\":{{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3],\
         \"deep\":{open}{close},\"numbers\":[1.7e308,-1.7E+308,1e-999,{}]}}}}",
        "9".repeat(308)
    ));
    model.tensors[0].file_offset = model.tensors[0].file_offset + prefix.len() as u64 - before;
    model.files[0].arrays[0].1 = prefix;
    model.refresh();
    let about =
        "a header 100 deep, a name in a surrogate pair, and numbers within a double's range";
    whole("header-edges", about, &model)
}

/// What an encoding means is not known without the dtype.
fn unknown_dtype() -> Vector {
    let mut items = [one(), Item::raw("new", Dtype::U8, &[4], vec![4; 4])];
    items[1].dtype = (99, "POSIT8".into());
    let mut model = Model::new(&items, &[]);
    let tensor = model.tensor("new");
    tensor.parameters = [1, 2, 3, u64::MAX];
    tensor.arrays.push(tensor.arrays[0].clone());
    let about = "an unknown dtype, raw, with two arrays and parameters that raw does not name";
    Vector::valid("unknown-dtype-raw", about, &model, model.build(), |tensor| tensor.name == b"new")
}

/// 15 aliases each of two tensors that no reader decodes.
fn unknown_aliases() -> Vector {
    let new = ["new.0", "new.1"]
        .map(|name| Item::raw(name, Dtype::U8, &[4], name.as_bytes()[..4].into()));
    let aliases =
        |item: &Item| (0..15).map(|at| item.alias(&format!("{}.{at:02}", item.name))).collect();
    let lists: [Vec<Item>; 2] = [aliases(&new[0]), aliases(&new[1])];
    let mut model = Model::new(&[&[one()][..], &new, &lists.concat()].concat(), &[]);
    for name in ["new.0", "new.1"] {
        model.tensor(name).encoding = 77;
    }
    let about = "15 aliases each of two tensors of an unknown encoding";
    let is_new = |tensor: &crate::container::Tensor| tensor.name.starts_with(b"new");
    Vector::valid("unknown-aliases", about, &model, model.build(), is_new)
}
