//! Any bytes as a container: a typed error, or a model on which everything gives bytes or a typed
//! error. The reference opens the same containers.

use crate::model;
use df11::OpenOptions;
use df11_reference::{Container, Kind};

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let reference = Container::open(data);
    let options = OpenOptions::new();
    for model in [
        model::open(&[data], &options),
        model::open_copied(data, &options),
        model::open(&[data], &options.clone().checksums(false)),
    ] {
        match (&model, &reference) {
            (Ok(model), Ok(_)) => model::exercise(model),
            (Err(error), Err(theirs)) => {
                model::assert_typed(error);
                assert_eq!(
                    model::is_unsupported(error),
                    theirs.kind == Kind::Unsupported,
                    "{error} / {theirs}"
                );
            }
            (Ok(_), Err(theirs)) => panic!("only df11 opens it; the reference: {theirs}"),
            (Err(ours), Ok(_)) => panic!("only the reference opens it; df11: {ours}"),
        }
    }
}
