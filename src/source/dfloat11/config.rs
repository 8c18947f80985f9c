//! What config.json says of a checkpoint of the package.

use std::{collections::BTreeMap, fs, path::Path};

use regex_lite::{Regex, RegexBuilder};
use serde::Deserialize;
use serde_json::Value;

use crate::{Error, Result, io::read_regular, source::unique};

/// The longest config.json, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// The most patterns, and the most bytes that one takes when it is compiled: 16 MiB for all of
/// them, where a checkpoint has a handful of some KB.
const MAX_PATTERNS: u64 = 256;
const MAX_PATTERN_BYTES: usize = 64 << 10;
/// What the package's kernel is made for.
const BYTES_PER_THREAD: u64 = super::coded::BYTES_PER_THREAD;

/// A config.json with a `dfloat11_config`.
pub(super) struct Config {
    /// The version of the package.
    pub(super) version: Option<String>,
    /// Threads of a thread block, 1..=1024.
    pub(super) threads_per_block: u64,
    /// Names of matrices for each pattern of module names.
    patterns: Vec<(Regex, Vec<String>)>,
    /// All of it, for what it says of the model.
    pub(super) json: Value,
}

#[derive(Deserialize)]
struct Json {
    version: Option<String>,
    threads_per_block: Threads,
    bytes_per_thread: u64,
    pattern_dict: BTreeMap<String, Vec<String>>,
}

/// CUDA's dimensions, or the first of them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Threads {
    One(u64),
    List([u64; 1]),
}

impl Config {
    /// Reads a config.json; `None` if there is none, or none of the package.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is not what the package writes; [`Error::Unsupported`] for a
    /// geometry that its kernel does not have, or a pattern beyond ours; [`Error::Limit`] for a
    /// config, or a number of patterns, that no checkpoint has; [`Error::Io`].
    pub(super) fn read(file: &Path) -> Result<Option<Self>> {
        let length = match fs::metadata(file) {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            _ => return Ok(None),
        };
        let place = file.display();
        Error::check_limit(format_args!("{place}: its length in bytes"), length, MAX_CONFIG_BYTES)?;
        let bytes = read_regular(file)?;
        let invalid = |error| {
            Error::corrupt(&place, 0, format!("not the config of a DFloat11 checkpoint: {error}"))
        };
        let json: Value = unique::from_slice(&bytes).map_err(invalid)?;
        let Some(own) = json.get("dfloat11_config") else { return Ok(None) };
        let own = Json::deserialize(own).map_err(invalid)?;
        let (Threads::One(threads_per_block) | Threads::List([threads_per_block])) =
            own.threads_per_block;
        if own.bytes_per_thread != BYTES_PER_THREAD || !(1..=1024).contains(&threads_per_block) {
            let what = format!(
                "{place}: {} bytes a thread, {threads_per_block} threads",
                own.bytes_per_thread
            );
            return Err(Error::unsupported(what, "compress the original BF16 files"));
        }
        let what = format_args!("{place}: the number of patterns in its pattern_dict");
        Error::check_limit(what, own.pattern_dict.len() as u64, MAX_PATTERNS)?;
        let patterns = own.pattern_dict.into_iter().map(|(pattern, attributes)| {
            let mut regex = RegexBuilder::new(&format!("^(?:{pattern})$"));
            let regex = regex.size_limit(MAX_PATTERN_BYTES).build().map_err(|error| {
                let what = format!("{place}: the pattern {pattern:?} ({error})").replace('\n', " ");
                Error::unsupported(what, "write it in plain regular expressions")
            })?;
            Ok((regex, attributes))
        });
        let patterns = patterns.collect::<Result<_>>()?;
        Ok(Some(Self { version: own.version, threads_per_block, patterns, json }))
    }

    /// The names of matrices in each pattern that matches this module.
    pub(super) fn attributes(&self, module: &str) -> impl Iterator<Item = &Vec<String>> {
        self.patterns
            .iter()
            .filter(move |(regex, _)| regex.is_match(module))
            .map(|(_, attributes)| attributes)
    }
}
