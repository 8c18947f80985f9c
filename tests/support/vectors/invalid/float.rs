//! Section 6.5: dtypes and zero bits, the plane, exponents, and what only verification finds. What
//! `float` has in common with `tile` is broken there.

use df11::Dtype;

use super::{Edits, HUGE, Vectors, shorten};
use crate::container::{
    Item, Model, Store, Tensor,
    tile_arrays::{Arrays, Codebook, Split, tiles_of},
};
use crate::vectors::float::{floats, matrix};

pub(super) fn make(to: &mut Vectors) {
    let f32 = Model::new(&[matrix((Dtype::F32, 13), 40, 264)], &[]);
    to.of(&f32).tensors(PARAMETERS);
    to.of(&f32).tensors(ARRAYS);
    // The last unit has three weights of four bits, from byte 4 × (2 × 5 + 1) of the plane on.
    let mut odd = Model::new(&[vector(299, None)], &[]);
    odd.tensor("w").array(3)[45] |= 0x80;
    to.invalid("float-bits-after-unit", odd.build());
    // Lane 0 has exponents that E4M3 has not, with a code and behind the escape.
    for (name, codebook) in [
        ("float-exponent", Codebook::new(2, [(1, 0x0707), (2, 0x0710)])),
        ("float-exponent-escaped", Codebook::new(1, [(1, 0x0707)])),
    ] {
        to.invalid(name, Model::new(&[vector(300, Some(codebook))], &[]).build());
    }
}

/// A vector of E4M3; with a codebook, of the pairs 0707 and, once, 0710.
fn vector(elements: usize, codebook: Option<Codebook>) -> Item {
    let (of, shape) = ((Dtype::F8_E4M3, 0), [elements as u64]);
    let data = match codebook {
        Some(_) => vec![0x38; elements],
        None => floats(of, elements, 9),
    };
    let item = Item::floats("w", of.0, &shape, data.clone(), ((8192, shape[0]), 0, 2));
    let Some(codebook) = codebook else { return item };
    let mut tiles = tiles_of(&data, Split::of(of.0.id(), 0), 8192, elements);
    tiles[0].lanes[0][0] = crate::container::tile_arrays::Pair::Coded(0x0710);
    let arrays = Arrays::with(&tiles, 8192, elements, &codebook);
    Item { store: Store::Encoded(arrays), ..item }
}

const PARAMETERS: Edits<'_, Tensor> = &[
    ("float-dtype", |tensor| tensor.dtype = Dtype::I32.id()),
    ("float-dtype-f64", |tensor| {
        (tensor.dtype, tensor.shape) = (Dtype::F64.id(), vec![20, 264]);
    }),
    ("float-bf16", |tensor| {
        (tensor.dtype, tensor.shape, tensor.parameters[3]) = (Dtype::BF16.id(), vec![80, 264], 0);
    }),
    ("float-empty", |tensor| tensor.shape = vec![0]),
    ("float-zero-bits", |tensor| tensor.parameters[3] = 12),
    ("float-zero-bits-more", |tensor| tensor.parameters[3] = 24),
    ("float-zero-bits-wide", |tensor| tensor.parameters[3] = (1 << 32) + 13),
    ("float-zero-bits-huge", |tensor| tensor.parameters[3] = HUGE),
    // The plane has another length then.
    ("float-zero-bits-other", |tensor| tensor.parameters[3] = 16),
    ("float-columns", |tensor| tensor.parameters[1] = 132),
];

const ARRAYS: Edits<'_, Tensor> = &[
    ("float-arrays", |tensor| drop(tensor.arrays.remove(1))),
    ("float-plane-short", |tensor| shorten(tensor.array(3), 1)),
    ("float-plane-long", |tensor| tensor.array(3).push(0)),
    ("float-hash", |tensor| tensor.array(3)[100] ^= 0x80),
];
