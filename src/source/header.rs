//! The JSON header of a safetensors file, read strictly (spec/format.md, section 7), and written.

use std::{
    collections::{HashMap, HashSet},
    fmt,
};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;

use crate::{
    Dtype, Error, Result,
    constants::{MAX_DIMENSIONS, MAX_NAME_BYTES},
};

/// Bytes of the header's length, which stands before it.
pub(super) const LENGTH_BYTES: u64 = size_of::<u64>() as u64;
const METADATA_KEY: &str = "__metadata__";
/// Deepest nesting of arrays and objects, the header's own object included.
const MAX_DEPTH: usize = 100;

/// A tensor as the header has it; its dtype may be of a later version.
#[derive(Deserialize)]
#[serde(expecting = "a tensor's entry")]
pub(crate) struct HeaderTensor {
    #[serde(skip)]
    pub(crate) name: String,
    #[serde(rename = "dtype")]
    pub(crate) dtype_name: String,
    pub(crate) shape: Vec<u64>,
    /// Where its bytes begin and end, counted from the end of the prefix.
    #[serde(rename = "data_offsets")]
    pub(crate) data: (u64, u64),
    /// Keeps the derived reader from taking a list of the fields for an entry.
    #[serde(flatten)]
    _others: IgnoredAny,
}

impl HeaderTensor {
    /// The dtype, or `None` if this version knows none of that name.
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        Dtype::from_name(&self.dtype_name)
    }
}

/// Reads the prefix (length, JSON, padding) of a file with this many bytes: the tensors, as of
/// [`parse_header`]. Errors name `path`.
pub(crate) fn read_header(path: &str, prefix: &[u8], length: u64) -> Result<Vec<HeaderTensor>> {
    let stated = prefix.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    if stated.and_then(|stated| stated.checked_add(LENGTH_BYTES)) != Some(prefix.len() as u64) {
        let problem = format!("the prefix has {} bytes, and says otherwise", prefix.len());
        return Err(Error::corrupt(path, 0, problem));
    }
    let tensors = parse_header(path, prefix)?;
    let described = data_bytes(&tensors).saturating_add(prefix.len() as u64);
    if described == length {
        return Ok(tensors);
    }
    let problem = format!("the header describes {described} bytes, and the file has {length}");
    Err(Error::corrupt(path, LENGTH_BYTES, problem))
}

/// Reads a prefix whose length is right. The tensors ascend by their data and follow each other
/// without holes; empty ones at the same offset ascend by name.
pub(super) fn parse_header(path: &str, prefix: &[u8]) -> Result<Vec<HeaderTensor>> {
    let json = std::str::from_utf8(&prefix[LENGTH_BYTES as usize..]).map_err(|error| {
        let offset = LENGTH_BYTES + error.valid_up_to() as u64;
        Error::corrupt(path, offset, "the header is not UTF-8, so this is not a safetensors file")
    })?;
    let invalid = |error: serde_json::Error| {
        let offset = LENGTH_BYTES + byte_of(json, error.line(), error.column());
        let problem = format!("the header is not a valid safetensors header: {error}");
        Error::corrupt(path, offset, problem)
    };
    let Unique { depth } = serde_json::from_str(json).map_err(invalid)?;
    if depth > MAX_DEPTH {
        let problem = format!("the header is nested deeper than {MAX_DEPTH}");
        return Err(Error::corrupt(path, LENGTH_BYTES, problem));
    }
    let header = serde_json::Deserializer::from_str(json).deserialize_map(HeaderVisitor);
    let mut tensors = header.map_err(invalid)?;
    tensors.sort_by(|a, b| a.data.cmp(&b.data).then_with(|| a.name.cmp(&b.name)));
    tensors
        .iter()
        .try_for_each(|tensor| tensor.check(path).map_err(|error| error.in_file(path)))?;
    let mut end = 0;
    for HeaderTensor { name, data, .. } in &tensors {
        let (start, stop) = *data;
        if start != end {
            let problem = format!(
                "the header contradicts itself (hole or overlap): tensor {name:?} starts at \
                {start}, not at {end}"
            );
            return Err(Error::corrupt(path, LENGTH_BYTES, problem));
        }
        end = stop;
    }
    Ok(tensors)
}

/// The number of bytes after the prefix.
pub(super) fn data_bytes(tensors: &[HeaderTensor]) -> u64 {
    tensors.last().map_or(0, |last| last.data.1)
}

impl HeaderTensor {
    /// Checks that the container's limits allow it, and that its data has the length that it asks
    /// for.
    fn check(&self, path: &str) -> Result<()> {
        let (name, (start, end)) = (&self.name, self.data);
        let what = "the length of a tensor name in bytes";
        Error::check_limit(what, name.len() as u64, MAX_NAME_BYTES)?;
        if name.is_empty() || name.contains('\0') {
            let what = format!("the tensor name {name:?} (empty, or with a NUL)");
            let remedy =
                "rename the tensor; the format allows names of 1 to 4096 bytes without NUL";
            return Err(Error::unsupported(what, remedy));
        }
        let what = format_args!("the number of dimensions of {name:?}");
        Error::check_limit(what, self.shape.len() as u64, MAX_DIMENSIONS)?;
        if start > end {
            let problem =
                format!("the data of {name:?} spans {start}..{end}, which is not a range");
            return Err(Error::corrupt(path, LENGTH_BYTES, problem));
        }
        let Some(dtype) = self.dtype() else { return Ok(()) };
        let problem = match dtype.bytes(&self.shape) {
            Ok(bytes) if bytes == end - start => return Ok(()),
            Ok(bytes) => format!("tensor {name:?} has {} bytes, and needs {bytes}", end - start),
            Err(error @ Error::Limit { .. }) => return Err(error.in_file(name)),
            Err(error) => format!("tensor {name:?}: {error}"),
        };
        let problem = format!("the header contradicts itself (wrong size): {problem}");
        Err(Error::corrupt(path, LENGTH_BYTES, problem))
    }
}

/// The byte at a line and column, both counted from one; `serde_json` counts columns in bytes.
fn byte_of(json: &str, line: usize, column: usize) -> u64 {
    let before: usize = json.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (before + column.saturating_sub(1)) as u64
}

/// Takes the tensors in the order of the JSON.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Vec<HeaderTensor>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<HeaderTensor>, A::Error> {
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA_KEY {
                map.next_value::<Option<HashMap<String, String>>>()?;
            } else {
                tensors.push(HeaderTensor { name, ..map.next_value()? });
            }
        }
        Ok(tensors)
    }
}

/// The bytes of a safetensors file before its tensors, which follow each other in this order,
/// padded as the `safetensors` library pads.
///
/// # Errors
/// [`Error::Limit`] if the tensors have more bytes than can be counted.
pub(crate) fn prefix_of<'a>(
    metadata: Option<&Value>,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64], u64)>,
) -> Result<Vec<u8>> {
    let mut json: Vec<String> =
        metadata.iter().map(|metadata| format!("\"{METADATA_KEY}\":{metadata}")).collect();
    let mut end = 0u64;
    for (name, dtype, shape, bytes) in tensors {
        let start = end;
        end = end.checked_add(bytes).ok_or_else(|| Error::overflow("the bytes of a checkpoint"))?;
        json.push(format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{start},{end}]}}",
            Value::from(name),
            dtype.name(),
            Value::from(shape)
        ));
    }
    let mut json = format!("{{{}}}", json.join(",")).into_bytes();
    json.resize(json.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    let mut prefix = (json.len() as u64).to_le_bytes().to_vec();
    prefix.extend(json);
    Ok(prefix)
}

/// Any JSON value in which no object has two equal keys. Readers disagree on which of two equal
/// keys counts, so that one file could show two contents; such a file is rejected, wherever they
/// stand.
///
/// Nesting is bounded by the deserializer: `serde_json` stops at 128 levels.
#[derive(Default)]
struct Unique {
    /// Deepest nesting of arrays and objects so far.
    depth: usize,
}

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

/// Takes values that have no keys.
macro_rules! accept {
    ($($visit:ident $value:ty),*) => {
        $(fn $visit<E>(self, _: $value) -> Result<Unique, E> {
            Ok(Unique::default())
        })*
    };
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Unique;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Unique, E> {
        Ok(Unique::default())
    }

    accept! {
        visit_bool bool, visit_i64 i64, visit_u64 u64, visit_f64 f64, visit_str &str
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Unique, A::Error> {
        let mut depth = 0;
        while let Some(value) = values.next_element::<Unique>()? {
            depth = depth.max(value.depth);
        }
        Ok(Unique { depth: depth + 1 })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Unique, A::Error> {
        let (mut keys, mut depth) = (HashSet::new(), 0);
        while let Some(key) = entries.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format_args!("the key {key:?} occurs twice")));
            }
            keys.insert(key);
            depth = depth.max(entries.next_value::<Unique>()?.depth);
        }
        Ok(Unique { depth: depth + 1 })
    }
}

/// Reads JSON without duplicate keys.
pub(super) fn from_slice<T: DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice::<Unique>(json)?;
    serde_json::from_slice(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str) -> Result<usize, String> {
        serde_json::from_str(json).map(|Unique { depth }| depth).map_err(|error| error.to_string())
    }

    #[test]
    fn equal_keys_are_found_at_any_depth() {
        check(r#"{"a": [1, -2, 3.5, null, true, {"b": "c"}], "b": {"b": {}}}"#).unwrap();
        for json in [r#"{"a":1,"a":1}"#, r#"[{"x":{"a":1,"b":2,"\u0061":3}}]"#] {
            assert!(check(json).unwrap_err().contains("the key \"a\" occurs twice"), "{json}");
        }
    }

    #[test]
    fn depth_counts_no_brackets_in_texts() {
        for (json, expected) in
            [("1", 0), ("{}", 1), (r#"{"[[\\\"[":[{},[]]}"#, 3), (r#"[[1],"\\",[[2]]]"#, 3)]
        {
            assert_eq!(check(json), Ok(expected), "{json}");
        }
    }
}
