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
    let (mut draft, matrices) = match FIXTURES.get(usize::from(base % 8)) {
        Some(fixture) => (Draft::of(fixture), Vec::new()),
        None => Draft::new(&mut bytes),
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
                    let same = file.tensor(name).expect("a matrix").data() == weights;
                    assert!(same, "{name} changed");
                }
            }
            let whole = imported.iter().all(|(_, whole)| whole.is_some());
            let excused = !untouched || has_huge_weights(&matrices);
            assert!(whole || excused, "a sound checkpoint does not decode");
        }
        Err(error) => assert!(!untouched, "a sound checkpoint is refused: {error}"),
    }
}

/// Whether an exponent of 240 or more occurs, which may be one that the package has lost.
fn has_huge_weights(matrices: &[(String, Vec<u8>)]) -> bool {
    let mut weights = matrices.iter().flat_map(|(_, weights)| weights.as_chunks().0);
    weights.any(|weight| (u16::from_le_bytes(*weight) >> 7) as u8 >= 240)
}
