//! The base of a fine-tune during compression: computes the differences of tensors, and the
//! metadata by which readers find the base again.

use std::{
    ops::Range,
    path::{Component, Path, PathBuf},
    sync::Mutex,
};

use super::{
    coding::Coding,
    spill::{Spill, Spilled},
};
use crate::{
    Dtype, Error, Result,
    encoding::delta::{Codebook, DeltaSizes, Differences, Encoder, segment_elements},
    encoding::stored::ReadBase,
    format::Coded,
    open::{BASE, Base, BaseTensor, MAX_UPS, RecordedBase},
    parallel,
    paths::{is_container, scheme_of, shown_name},
    source::{
        SourceTensor,
        hub_cache::{is_repository, locate},
    },
    temporary::{is_temporary, parent_of},
};

/// The base's tensor from which this one may be a difference.
pub(super) fn base_of<'b>(base: Option<&'b Base>, tensor: &SourceTensor) -> Option<BaseTensor<'b>> {
    let found = base.filter(|_| tensor.dtype == Dtype::BF16)?.tensor(&tensor.name)?;
    (found.dtype() == Some(tensor.dtype) && found.shape() == tensor.shape).then_some(found)
}

/// Weights of the base beside those of a tensor.
pub(super) struct BaseReader<'b> {
    base: Box<dyn ReadBase + 'b>,
    bytes: Vec<u8>,
}

impl<'b> BaseReader<'b> {
    /// Prepares the base's tensor.
    pub(super) fn new(tensor: &BaseTensor<'b>) -> Result<Self> {
        Ok(Self { base: tensor.prepare()?, bytes: Vec::new() })
    }

    /// The base's bytes where the tensor has this range of them.
    pub(super) fn read(&mut self, range: &Range<u64>) -> Result<&[u8]> {
        self.bytes.resize((range.end - range.start) as usize, 0);
        self.base.read(range.start / 2..range.end / 2, &mut self.bytes)?;
        Ok(&self.bytes)
    }
}

/// Measures a tensor whose differences are counted, on all threads: encodes its segments, and adds
/// them to the spill if there is one. `read` reads a range of its bytes.
pub(super) fn measure(
    tensor: &SourceTensor,
    base: BaseTensor<'_>,
    differences: &Differences,
    spill: Option<&Spill>,
    read: impl Fn(Range<u64>, &mut Vec<u8>) -> Result<()> + Sync,
) -> Result<Coding> {
    let codebook = Codebook::new(differences);
    let (elements, each) = (tensor.length / 2, segment_elements(&tensor.shape));
    let segments = (0..elements.div_ceil(each)).map(|_| Mutex::default());
    // The bytes of each, and where they are spilled.
    let segments: Vec<Mutex<(u64, Spilled)>> = segments.collect();
    let new = || (Encoder::new(&codebook), Vec::new(), Vec::new());
    parallel::for_each(segments.len(), new, |(encoder, weights, out), segment| {
        let start = 2 * each * segment as u64;
        let range = start..tensor.length.min(start + 2 * each);
        read(range.clone(), weights)?;
        out.clear();
        encoder.encode_segment(BaseReader::new(&base)?.read(&range)?, weights, out)?;
        let spilled = spill.map_or(Ok(Spilled::default()), |spill| spill.add(out))?;
        *parallel::lock(&segments[segment]) = (out.len() as u64, spilled);
        Ok(())
    })?;
    let segments = segments.iter().map(|segment| *parallel::lock(segment));
    let (bytes, spilled): (Vec<u64>, Vec<Spilled>) = segments.unzip();
    let (stored, of) = (codebook.to_bytes(), (&tensor.shape[..], elements));
    let hash = *base.hash()?.as_bytes();
    let sizes = DeltaSizes::new(hash, of, stored.len() as u64, bytes.iter().sum())?;
    let bits = codebook.expected_bits(differences);
    Ok(Coding { spilled, ..Coding::new(Coded::Delta(sizes), stored, bits, &bytes) })
}

/// The entry of the metadata that tells where a base is, for this output.
pub(super) fn recorded(path: &Path, base: &Base, out: &Path) -> Result<(String, String)> {
    let identity = base.identity().map(|identity| identity.to_hex().to_string());
    let (repository, path) = hints(path, out)?;
    let recorded = RecordedBase { identity, repository, path };
    let json = serde_json::to_string(&recorded).expect("text can be written");
    Ok((BASE.to_owned(), json))
}

/// The repository or the path of a base.
fn hints(path: &Path, out: &Path) -> Result<(Option<String>, Option<String>)> {
    if let Some(name) = path.to_str().filter(|name| scheme_of(name).is_some()) {
        return Ok(named(name));
    }
    let place = locate(path)?;
    let path = place.repository.is_none().then(|| relative(&place.path, out)).flatten();
    Ok((place.repository, path))
}

/// The repository of a base that has the name of a store, if it is one of the Hub, or the last part
/// of its name: readers ask no store for it that they do not know.
fn named(name: &str) -> (Option<String>, Option<String>) {
    let name = shown_name(name);
    let (scheme, rest) = scheme_of(&name).unwrap_or(("", &name));
    let rest = rest.trim_end_matches('/');
    if scheme.eq_ignore_ascii_case("hf") && is_repository(rest) {
        return (Some(rest.to_owned()), None);
    }
    (None, rest.rsplit('/').next().map(str::to_owned))
}

/// The path from the folder of an output to a base; the base's name alone if they lie far apart.
fn relative(base: &Path, out: &Path) -> Option<String> {
    let base = base.canonicalize().ok()?;
    let parent = parent_of(out).canonicalize().ok()?;
    if is_temporary(&parent) {
        // The output will be in a store, far from here.
        return Some(base.file_name()?.to_str()?.to_owned());
    }
    let folder = if is_container(out) { parent } else { parent.join(out.file_name()?) };
    let shared = base.components().zip(folder.components()).take_while(|(a, b)| a == b).count();
    let ups = folder.components().count() - shared;
    let name = base.file_name()?.to_str()?.to_owned();
    let is_around = shared == base.components().count();
    let is_far = shared == 0 || ups > MAX_UPS || is_around;
    if is_far {
        return Some(name);
    }
    let down = base.components().skip(shared).map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let up = std::iter::repeat_n(Some(".."), ups);
    Some(up.chain(down).collect::<Option<Vec<_>>>()?.join("/"))
}

/// Refuses a base for several models.
pub(super) fn check_single(base: Option<&PathBuf>, models: usize) -> Result<()> {
    Error::unless(base.is_none() || models == 1, || {
        let problem = "a base is one model, and this is a pipeline";
        Error::parameter(problem, "compress its components, each against its own base")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_stores_are_not_recorded() {
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(named("hf://org/name"), (text("org/name"), None));
        assert_eq!(named("hf://org/name@main/base"), (None, text("base")));
        assert_eq!(named("https://me:secret@host/a/base.df11?key=1"), (None, text("base.df11")));
        assert_eq!(named("s3://bucket/models/base/"), (None, text("base")));
    }

    #[test]
    fn paths_lead_from_the_output_to_the_base() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["base", "a/b/c/d"] {
            std::fs::create_dir_all(path(name)).unwrap();
        }
        let found = |out: &str| relative(&path("base"), &path(out));
        assert_eq!(found("tune").as_deref(), Some("../base"));
        assert_eq!(found("tune.df11").as_deref(), Some("base"));
        assert_eq!(found("a/tune").as_deref(), Some("../../base"));
        assert_eq!(found("a/b/c/d/tune").as_deref(), Some("base"));
        assert_eq!(found("base/tune").as_deref(), Some("base"));
        // One that goes into a store.
        std::fs::create_dir(path(".df11-aB3dEf.part")).unwrap();
        assert_eq!(found(".df11-aB3dEf.part/tune").as_deref(), Some("base"));
    }
}
