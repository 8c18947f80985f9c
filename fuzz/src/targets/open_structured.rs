//! A valid container, changed in fields and contents and with its checksums right again: nothing
//! panics, and df11 agrees with the reference decoder.
//!
//! Agreement means:
//!
//! 1. One opens the container if and only if the other does; else both say Unsupported, or both say
//!    Corrupt or Limit. (Where a sum overflows the format lets a reader choose between these two.)
//! 2. A tensor decodes to the same bytes, or both report an error, likewise. df11 may report
//!    Corrupt where only verification must: it looks at the number of LUTs and at the zeros after
//!    the last code whenever it decodes.
//! 3. Where the witness of verification finds a broken rule, df11's verification does. (The reverse
//!    does not hold: the witness knows neither hashes nor JSON.) Where it finds none, but something
//!    Unsupported, df11's names what it could not check, or finds something broken.

use crate::{
    bytes::Bytes,
    draft::Draft,
    model,
    samples::CONTAINERS,
    witness::{self, Failure},
};
use df11::{Level, Model, OpenOptions};
use df11_reference::Container;

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    let base = bytes.u8();
    let original = &CONTAINERS[usize::from(base) % CONTAINERS.len()];
    let mut draft = Draft::new(original);
    let changes = bytes.u8() % 8;
    for _ in 0..changes {
        draft.change(&mut bytes);
    }
    let untouched = changes == 0 && bytes.is_empty();
    let container = draft.render(&mut bytes);
    assert!(
        !untouched || container == *original,
        "taking apart and putting together changes nothing"
    );

    let ours = model::open(&[&container], &OpenOptions::new());
    let theirs = Container::open(&container);
    model::assert_agreement(&ours, &theirs);
    if let (Ok(model), Ok(reference)) = (&ours, &theirs) {
        let witness = witness::verify(&container, model.shards()[0].directory());
        decode(model, reference, witness.err());
        verify(model, witness.err());
        model::exercise(model);
        let copied =
            model::open_copied(&container, &OpenOptions::new()).expect("it opens with views");
        same(model, &copied);
        let unchecked = model::open(&[&container], &OpenOptions::new().checksums(false));
        model::exercise(&unchecked.expect("it opens with checksums"));
    }
    // With another shard: names, indices and identities may clash, which is the caller's fault or
    // the file's.
    if let Ok(model) = model::open(&[&container, &CONTAINERS[4]], &OpenOptions::new()) {
        model::exercise(&model);
    }
}

fn decode(model: &Model, reference: &Container<'_>, witness: Option<Failure>) {
    assert_eq!(model.tensors().count(), reference.tensors().len());
    for ((index, tensor), info) in model.tensors().enumerate().zip(reference.tensors()) {
        assert_eq!(
            (tensor.name(), &tensor.shape()[..], tensor.hash().as_bytes()),
            (info.name, info.shape, info.hash)
        );
        let (ours, theirs) = (tensor.decode::<u8>(), reference.decode(index));
        if let (Err(ours), Ok(_)) = (&ours, &theirs) {
            let broken = matches!(witness, Some(Failure::Corrupt(_)));
            assert!(broken, "only the reference decodes {:?}; df11: {ours}", info.name);
        } else {
            model::assert_agreement(&ours, &theirs);
            assert!(ours.ok() == theirs.ok(), "two results for {:?}", info.name);
        }
    }
}

fn verify(model: &Model, witness: Option<Failure>) {
    match (model.verify(Level::Full, &()), witness) {
        (Ok(_), Some(Failure::Corrupt(rule))) => {
            panic!("only the witness finds what is wrong: {rule}")
        }
        (Ok(found), Some(Failure::Unsupported)) => {
            assert!(!found.unchecked.is_empty(), "df11 does not say what it did not check");
        }
        (Err(ours), _) => model::assert_typed(&ours),
        (Ok(_), None) => {}
    }
}

/// A reader without views decodes the same.
fn same(model: &Model, copied: &Model) {
    for (a, b) in model.tensors().zip(copied.tensors()) {
        let same = a.decode::<u8>().ok() == b.decode::<u8>().ok();
        assert!(same, "views make a difference to {:?}", a.name());
    }
    let levels = [Level::Structure, Level::Checksums, Level::Full];
    assert!(
        levels.iter().all(|&level| model.verify(level, &()).ok() == copied.verify(level, &()).ok())
    );
}
