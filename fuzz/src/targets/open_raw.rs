//! Any bytes as a container: a typed error, or a model on which everything gives bytes or a typed
//! error. The reference opens the same containers.

use crate::model;
use df11::OpenOptions;
use df11_reference::Container;

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let reference = Container::open(data);
    let options = OpenOptions::new();
    for model in [
        model::open(&[data], &options),
        model::open_copied(data, &options),
        model::open(&[data], &options.clone().checksums(false)),
    ] {
        model::assert_agreement(&model, &reference);
        if let Ok(model) = &model {
            model::exercise(model);
        }
    }
}
