//! Any bytes as a safetensors file: what we accept the `safetensors` crate accepts, with the same
//! tensors; what it accepts we accept, except for duplicate keys, entries that are lists, dtypes
//! that are objects, and what exceeds the limits of a container.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use df11::{Error, hazmat::constants, source::WeightsFile};
use safetensors::SafeTensors;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let ours = WeightsFile::parse("model.safetensors", Arc::new(data.to_vec()));
    let theirs = SafeTensors::deserialize(data);
    match (ours, theirs) {
        (Ok(ours), Ok(theirs)) => compare(data, &ours, &theirs),
        (Ok(_), Err(error)) => panic!("the safetensors crate rejects it: {error:?}"),
        (Err(error), Ok(theirs)) => excuse(data, &error, &theirs),
        (Err(error), Err(_)) => {
            let expected = matches!(
                error,
                Error::Corrupt { .. } | Error::Limit { .. } | Error::Unsupported { .. }
            );
            assert!(expected, "{error:?}");
        }
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
    let duplicates = serde_json::from_slice::<Distinct>(json).is_err();
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
    let shapes =
        serde_json::from_slice::<HashMap<String, serde_json::Value>>(json).is_ok_and(|entries| {
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
fn is_plain(entry: &serde_json::Value) -> bool {
    entry.get("dtype").is_some_and(serde_json::Value::is_string)
}

/// JSON without equal keys in one object; an error says that it has some.
struct Distinct;

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Distinct)
    }
}

impl<'de> Visitor<'de> for Distinct {
    type Value = Self;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<Self>()?;
            if !keys.insert(key) {
                return Err(serde::de::Error::custom("a key occurs twice"));
            }
        }
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }
}
