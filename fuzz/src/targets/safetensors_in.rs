//! Any bytes as a safetensors file: what we accept the `safetensors` crate accepts, with the same
//! tensors; what it accepts we accept, except for duplicate keys, entries that are lists, dtypes
//! that are objects, and what exceeds the limits of a container.

use std::{collections::HashMap, sync::Arc};

use crate::model;
use df11::{Error, hazmat::constants, source::WeightsFile};
use safetensors::SafeTensors;
use serde_json::Value;

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let ours = WeightsFile::parse("model.safetensors", Arc::new(data.to_vec()));
    let theirs = SafeTensors::deserialize(data);
    match (ours, theirs) {
        (Ok(ours), Ok(theirs)) => compare(data, &ours, &theirs),
        (Ok(_), Err(error)) => panic!("the safetensors crate rejects it: {error:?}"),
        (Err(error), Ok(theirs)) => excuse(data, &error, &theirs),
        (Err(error), Err(_)) => model::assert_typed(&error),
    }
}

/// Both see the same tensors, and ours cover the file.
fn compare(data: &[u8], ours: &WeightsFile, theirs: &SafeTensors<'_>) {
    assert_eq!(ours.tensors.len(), theirs.len());
    assert_eq!(ours.prefix, data[..ours.prefix.len()]);
    let mut position = ours.prefix.len() as u64;
    for tensor in &ours.tensors {
        let view = theirs.tensor(&tensor.name).expect("a tensor that both have");
        assert_eq!(view.dtype().to_string(), tensor.dtype.name());
        assert!(
            view.shape().iter().map(|&dimension| dimension as u64).eq(tensor.shape.iter().copied())
        );
        assert_eq!(tensor.offset, position);
        position += tensor.length;
        assert_eq!(view.data(), &data[tensor.offset as usize..position as usize]);
        assert_eq!(tensor.dtype.bytes(&tensor.shape).expect("a size"), tensor.length);
    }
    assert_eq!(position, data.len() as u64);
}

/// Our reason for rejecting what the crate accepts is one of those that we state.
fn excuse(data: &[u8], error: &Error, theirs: &SafeTensors<'_>) {
    let length = u64::from_le_bytes(data[..8].try_into().expect("8 bytes")) as usize;
    let json = &data[8..8 + length];
    let duplicates = has_duplicates(json);
    let limits = theirs.iter().any(|(name, view)| {
        let mut dimensions = view.shape().iter().filter(|&&dimension| dimension > 0);
        let bits = dimensions.try_fold(view.dtype().bitsize() as u64, |product, &dimension| {
            product.checked_mul(dimension as u64)
        });
        name.is_empty()
            || name.contains('\0')
            || name.len() as u64 > constants::MAX_NAME_BYTES
            || view.shape().len() as u64 > constants::MAX_DIMENSIONS
            || bits.is_none()
    });
    let shapes = serde_json::from_slice::<HashMap<String, Value>>(json).is_ok_and(|entries| {
        entries.iter().any(|(name, entry)| name != "__metadata__" && !is_plain(entry))
    });
    assert!(duplicates || limits || shapes, "rejected without a reason: {error:?}");
    let expected = match error {
        Error::Corrupt { .. } => duplicates || shapes,
        Error::Limit { .. } | Error::Unsupported { .. } => limits,
        _ => false,
    };
    assert!(expected, "the reason is another one: {error:?}");
}

/// Whether an entry is an object and its dtype a string; the crate takes other forms too.
fn is_plain(entry: &Value) -> bool {
    entry.get("dtype").is_some_and(Value::is_string)
}

/// Whether a key occurs twice in some object of valid JSON: then what was parsed has fewer keys
/// than the text has colons outside of strings.
fn has_duplicates(json: &[u8]) -> bool {
    let (mut colons, mut in_text, mut is_escaped) = (0, false, false);
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_text,
            b'"' => in_text = !in_text,
            b':' if !in_text => colons += 1,
            _ => {}
        }
    }
    serde_json::from_slice(json).map_or(true, |value| keys(&value) < colons)
}

fn keys(value: &Value) -> usize {
    match value {
        Value::Object(members) => members.len() + members.values().map(keys).sum::<usize>(),
        Value::Array(items) => items.iter().map(keys).sum(),
        _ => 0,
    }
}
