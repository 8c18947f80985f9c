//! A checkpoint of the official DFloat11 package (one of the fixtures, or made up), changed in any
//! way: a typed error, or files that read alike as a whole and in ranges, and hold what
//! `import::judge` finds, which decodes as the package does. Made-up ones that are not changed have
//! the weights that went in.

use crate::{
    bytes::Bytes,
    import::{
        draft::{Draft, FIXTURES},
        judge,
    },
};
use safetensors::SafeTensors;

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    let base = bytes.u8();
    let (mut draft, matrices) = match base % 8 {
        0 => (Draft::of(&FIXTURES[0]), Vec::new()),
        1 => (Draft::of(&FIXTURES[1]), Vec::new()),
        _ => Draft::new(&mut bytes),
    };
    let changes = base / 32;
    for _ in 0..changes {
        draft.change(&mut bytes);
    }
    let ranges = bytes.take::<32>();
    let untouched = changes == 0 && bytes.is_empty();
    let folder = draft.render(&mut bytes);
    match folder.import(&mut Bytes(&ranges)) {
        Ok(imported) => {
            judge::check(&folder, &imported);
            if untouched && let Some(whole) = &imported[0].1 {
                let file = SafeTensors::deserialize(whole).expect("a safetensors file");
                for (name, weights) in &matrices {
                    assert!(
                        file.tensor(name).expect("a matrix").data() == weights,
                        "{name} changed"
                    );
                }
            }
            let whole = imported.iter().all(|(_, whole)| whole.is_some());
            assert!(
                !untouched || whole || has_huge_weights(&matrices),
                "a sound checkpoint does not decode"
            );
        }
        Err(error) => assert!(!untouched, "a sound checkpoint is refused: {error}"),
    }
}

/// Whether an exponent of 240 or more occurs, which may be one that the package has lost.
fn has_huge_weights(matrices: &[(String, Vec<u8>)]) -> bool {
    matrices.iter().flat_map(|(_, weights)| weights.as_chunks().0).any(|weight| {
        let bits = u16::from_le_bytes(*weight);
        (bits >> 7) as u8 >= 240
    })
}
