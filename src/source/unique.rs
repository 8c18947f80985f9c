//! A pass over JSON that finds nothing but duplicate keys.
//!
//! Readers disagree on which of two equal keys counts, so that one file could show two contents;
//! such a file is rejected, wherever the two keys stand.

use std::{collections::HashSet, fmt};

use serde::de::{
    Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor,
};

/// Any JSON value in which no object has two equal keys.
///
/// Nesting is bounded by the deserializer: `serde_json` stops at 128 levels.
pub(super) struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

/// Takes values that have no keys.
macro_rules! accept {
    ($($visit:ident $value:ty),*) => {
        $(fn $visit<E>(self, _: $value) -> Result<Self, E> {
            Ok(self)
        })*
    };
}

impl<'de> Visitor<'de> for Unique {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    accept! { visit_bool bool, visit_i64 i64, visit_u64 u64, visit_f64 f64, visit_str &str }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Self, A::Error> {
        while values.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = entries.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format_args!("the key {key:?} occurs twice")));
            }
            keys.insert(key);
            entries.next_value::<Self>()?;
        }
        Ok(self)
    }
}

/// Reads JSON without duplicate keys.
pub(super) fn from_slice<T: DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice::<Unique>(json)?;
    serde_json::from_slice(json)
}

/// How many arrays and objects lie in each other at most, in JSON that is valid.
pub(super) fn depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0, 0);
    let mut bytes = json.bytes();
    let mut in_text = false;
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => in_text = !in_text,
            // What is escaped may be a quotation mark.
            b'\\' if in_text => drop(bytes.next()),
            b'[' | b'{' if !in_text => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_text => depth -= 1,
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str) -> Result<(), String> {
        serde_json::from_str::<Unique>(json).map(|_| ()).map_err(|error| error.to_string())
    }

    #[test]
    fn equal_keys_are_found_at_any_depth() {
        check(r#"{"a": [1, -2, 3.5, null, true, {"b": "c"}], "b": {"b": {}}}"#).unwrap();
        for json in [r#"{"a":1,"a":1}"#, r#"[{"x":{"a":1,"b":2,"\u0061":3}}]"#] {
            assert!(check(json).unwrap_err().contains("the key \"a\" occurs twice"), "{json}");
        }
    }

    #[test]
    fn deep_nesting_ends_in_an_error() {
        let error = check(&"[".repeat(1_000_000)).unwrap_err();
        assert!(error.contains("recursion limit"), "{error}");
    }

    #[test]
    fn depth_counts_no_brackets_in_texts() {
        for (json, expected) in
            [("1", 0), ("{}", 1), (r#"{"[[\\\"[":[{},[]]}"#, 3), (r#"[[1],"\\",[[2]]]"#, 3)]
        {
            assert_eq!(depth(json), expected, "{json}");
        }
    }
}
