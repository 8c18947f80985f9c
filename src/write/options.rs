//! Options for compression.

use std::{collections::BTreeMap, path::PathBuf};

use crate::{
    Error, Result,
    constants::{MAX_KEY_BYTES, MAX_METADATA_BYTES, MAX_VALUE_BYTES},
    encoding::gap::GapGeometry,
};

/// How BF16 tensors are stored. Coded tensors of other floats (F16, F32, FP8) have the encoding
/// `float`, except with [`Layout::Raw`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Huffman-coded exponents with a gap array (spec, section 6.3), if that is smaller than raw.
    Gap(GapGeometry),
    /// Huffman-coded pairs of exponents in tiles (spec, section 6.4), if that is smaller than raw:
    /// smaller than `gap`, and faster on a GPU. If the four lowest bits of all weights of a tensor
    /// are zero, as in BF16 that was FP8 with scales that are powers of two, the tiles have the
    /// encoding `float` (section 6.5); kernels multiply by it only in the fast layout.
    #[default]
    Tile,
    /// The original bytes.
    Raw,
}

impl Layout {
    /// [`Layout::Gap`] with the geometry that decodes fastest.
    pub fn gap() -> Self {
        Self::Gap(GapGeometry::default())
    }
}

/// Options of [`compress`](super::compress()) and [`convert`](super::convert).
///
/// ```
/// use df11::{CompressOptions, Layout};
///
/// let options = CompressOptions::new().layout(Layout::gap()).overwrite(true);
/// ```
#[derive(Clone, Debug)]
pub struct CompressOptions {
    pub(crate) layout: Layout,
    pub(crate) overwrite: bool,
    pub(crate) verify: bool,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) card: Option<Card>,
    pub(crate) base: Option<PathBuf>,
}

impl Default for CompressOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl CompressOptions {
    /// Defaults: tiles; verified; no metadata and no card; an existing output is not replaced.
    pub const fn new() -> Self {
        Self {
            layout: Layout::Tile,
            overwrite: false,
            verify: true,
            metadata: BTreeMap::new(),
            card: None,
            base: None,
        }
    }

    /// How BF16 tensors are stored.
    #[must_use]
    pub const fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Whether to replace an existing output. A folder is replaced only if each file in it has the
    /// path of a new one, is a shard of the only model there, or is a side file that this model
    /// records.
    #[must_use]
    pub const fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Whether to decode everything again before the output gets its name, and to compare all
    /// hashes (the default).
    #[must_use]
    pub const fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// Keys and values for runtimes, which read them by
    /// [`Model::metadata`](crate::Model::metadata). A key begins with the name of its owner and a
    /// dot: `example.com/tool` or `tool.setting`; keys without a dot are reserved by the
    /// specification. A converted model keeps its own metadata too.
    #[must_use]
    pub fn metadata(mut self, metadata: BTreeMap<String, String>) -> Self {
        self.metadata = metadata;
        self
    }

    /// The model from which this one was fine-tuned: its folder, its container or safetensors file,
    /// or its name in the cache of the Hub (`org/name`). BF16 tensors are stored as their
    /// differences from the base's tensors of the same names if that is smaller; such tensors
    /// decode only if the base is available: see [`OpenOptions::base`](crate::OpenOptions::base).
    /// Compression needs disk space for the differences twice: they first go to a temporary file
    /// beside the output.
    #[must_use]
    pub fn base(mut self, base: impl Into<PathBuf>) -> Self {
        self.base = Some(base.into());
        self
    }

    /// The model card to write into a folder, if any: `README.md`, or `DF11.md` if the model has a
    /// file of that name. It is not part of the model, and [`decompress`](super::decompress) leaves
    /// it out.
    #[must_use]
    pub fn card(mut self, card: Option<Card>) -> Self {
        self.card = card;
        self
    }
}

/// Options of [`decompress`](super::decompress).
#[derive(Clone, Debug, Default)]
pub struct DecompressOptions {
    pub(crate) overwrite: bool,
    pub(crate) keep_changed: bool,
}

impl DecompressOptions {
    /// Defaults: an existing output is not replaced, and a changed side file is an error.
    pub const fn new() -> Self {
        Self { overwrite: false, keep_changed: false }
    }

    /// Whether to replace an existing output; a folder is replaced only if each file in it has the
    /// path of a new one.
    #[must_use]
    pub const fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Whether to copy side files that have changed since compression, and to continue without
    /// missing ones, instead of failing.
    #[must_use]
    pub const fn keep_changed(mut self, keep_changed: bool) -> Self {
        self.keep_changed = keep_changed;
        self
    }
}

/// Checks that a key is one that anybody may set; keys without a dot belong to the spec.
pub(super) fn check_key(key: &str) -> Result<()> {
    if key.starts_with("df11.") {
        let problem = format!("the metadata key {key:?} is one of this software's own");
        let remedy = "put another name before the dot, as in tool.setting";
        return Err(Error::parameter(problem, remedy));
    }
    let is_private =
        key.split_once('.').is_some_and(|(owner, rest)| !owner.is_empty() && !rest.is_empty());
    Error::unless(is_private, || {
        let problem = format!("the metadata key {key:?} does not name its owner");
        Error::parameter(problem, "put a name and a dot before it, as in tool.setting")
    })
}

/// Checks metadata against the limits of the format.
pub(super) fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<()> {
    let mut bytes = 0;
    for (key, value) in metadata {
        let (key_bytes, value_bytes) = (key.len() as u64, value.len() as u64);
        if key.is_empty() || key.contains('\0') || value.contains('\0') {
            let problem = format!("the metadata entry {key:?} has an empty key, or a NUL");
            return Err(Error::parameter(problem, "keys and values are text"));
        }
        let what = format_args!("the length of key {key:?} in bytes");
        Error::check_limit(what, key_bytes, MAX_KEY_BYTES)?;
        let what = format_args!("the length of the value of {key:?} in bytes");
        Error::check_limit(what, value_bytes, MAX_VALUE_BYTES)?;
        bytes += key_bytes + value_bytes;
    }
    Error::check_limit("the length of all metadata in bytes", bytes, MAX_METADATA_BYTES)
}

/// Contents of a model card beyond what the files tell.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Card {
    /// The repository of the Hub that was compressed, as `org/name`.
    pub base_model: Option<String>,
}

impl Card {
    /// A card that names this repository of the Hub, if it is known.
    pub const fn new(base_model: Option<String>) -> Self {
        Self { base_model }
    }
}
