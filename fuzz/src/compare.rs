//! What the fast decoders make of the arrays of a tensor, right or wrong, against the reference and
//! the witness of verification.

use std::ops::Range;

use df11::{Error, Result};

use crate::array_witness;

/// Some elements from two numbers.
pub fn range(count: u64, cuts: [u64; 2]) -> Range<u64> {
    let (start, end) = (cuts[0] % count, cuts[1] % (count + 1));
    start.min(end)..start.max(end).max(start + 1)
}

/// What is known of arrays whose lengths fit their parameters.
pub struct Judgement {
    /// Nothing was changed.
    pub valid: bool,
    /// All weights.
    pub reference: df11_reference::Result<Vec<u8>>,
    /// Whether verification passes.
    pub witness: array_witness::Result,
}

impl Judgement {
    /// All weights: the fast decoder gives them if and only if the reference does, and what it
    /// looks at besides is right, as `checked` says. Otherwise it reports Corrupt.
    pub fn whole(&self, ours: Result<Vec<u8>>, checked: bool) {
        if let (Ok(_), Err(error)) = (&ours, &self.reference) {
            panic!("only the fast decoder decodes; the reference: {error}");
        }
        self.part(ours, 0..u64::MAX, checked);
    }

    /// Weights of a range: those of the reference, if it gives any; else any, or Corrupt.
    pub fn part(&self, ours: Result<Vec<u8>>, elements: Range<u64>, checked: bool) {
        let expected = self.reference.as_ref().ok().map(|weights| {
            let end = elements.end.min(weights.len() as u64 / 2);
            &weights[2 * elements.start as usize..2 * end as usize]
        });
        match (ours, expected) {
            (Ok(ours), Some(expected)) => {
                assert!(ours == expected, "two results in {elements:?}");
                assert!(checked, "more than the fast decoder checks in {elements:?}");
            }
            (Err(error), Some(_)) => {
                assert!(!checked, "only the reference decodes {elements:?}; the other: {error}");
                self.is_refused(&error);
            }
            (Err(error), None) => self.is_refused(&error),
            (Ok(_), None) => {}
        }
    }

    /// Verification passes if and only if that of the witness does.
    pub fn verification(&self, ours: Result<()>) {
        match (ours, &self.witness) {
            (Ok(()), Ok(())) => {}
            (Err(error), Err(_)) => self.is_refused(&error),
            (ours, theirs) => panic!("one verifies: {ours:?} {theirs:?}"),
        }
    }

    fn is_refused(&self, error: &Error) {
        assert!(!self.valid && matches!(error, Error::Corrupt { .. }), "{error:?}");
    }
}
