//! Opens what is at a path: a container, all shards of a model, or the components of a pipeline.
//!
//! `pipeline.df11` has no weights. It records the files of the pipeline that belong to no
//! component, and in its metadata it lists the components with their identities, so that none is
//! lost unnoticed.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use super::{model::Model, options::OpenOptions, shard::Shard};
#[cfg(not(feature = "remote"))]
use crate::paths::no_stores;
use crate::{
    Error, Result,
    constants::MAGIC,
    error::io_remedied,
    format::Directory,
    io::{FileReader, ReadAt, open_regular},
    paths::{PIPELINE, check_path, is_container, is_safetensors, scheme_of},
    source::{Component, HIDDEN, check_installed, named},
};

/// Opens a model: a container, or a folder with all its shards. Equals
/// `OpenOptions::new().open(path)`.
///
/// Reads and validates headers and directories; the cost grows with the number of tensors and not
/// with their size. Containers are mapped into memory: **they must not be truncated or changed
/// while they are open** (a truncated file would end the process with SIGBUS). Writing the same
/// model again with this crate is safe, because it renames a new file over the old one. If files
/// may change in place, use [`OpenOptions::memory_map`].
///
/// # Errors
/// [`Error::Io`], [`Error::Unsupported`], [`Error::Corrupt`] or [`Error::Limit`], with the file's
/// name; [`Error::Parameter`] if a folder holds no container, or shards of different models.
pub fn open(path: impl AsRef<Path>) -> Result<Model> {
    OpenOptions::new().open(path)
}

impl OpenOptions {
    /// Opens a container, or a folder with all its shards. Containers in its subfolders
    /// belong to the model too, unless the folder itself holds all shards: then subfolders may hold
    /// other models, such as checkpoints. See [`open`].
    ///
    /// # Errors
    /// Like [`open`]; [`Error::Parameter`] if the only containers are those of another model in a
    /// subfolder.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Model> {
        self.with_base(self.open_alone(path.as_ref())?)
    }

    /// Opens a model without the base that it may need.
    fn open_alone(&self, path: &Path) -> Result<Model> {
        if let Some(name) = name_of(path) {
            return self.open_all_named(name)?.single("open");
        }
        let metadata = fs::metadata(path)
            .map_err(|error| Error::io("opening", path, or_fetch(path, error)))?;
        if !metadata.is_dir() {
            check_kind(path)?;
            return Model::new(vec![self.shard(path)?], None);
        }
        check_installed(path)?;
        if path.join(PIPELINE).is_file() {
            let problem = format!("{} holds a pipeline, which is several models", path.display());
            let remedy = "name the folder of a component, or use a call that takes pipelines";
            return Err(Error::parameter(problem, remedy));
        }
        Model::new(self.shards(path)?, Some(path.to_owned()))
    }

    /// Opens containers that are not files: bytes in memory, or a remote store. Errors show `name`
    /// in place of a path.
    ///
    /// # Errors
    /// Like [`open`].
    pub fn open_readers(&self, readers: Vec<(PathBuf, Box<dyn ReadAt>)>) -> Result<Model> {
        if readers.is_empty() {
            let problem = "a model has at least one container";
            return Err(Error::parameter(problem, "pass one or more readers"));
        }
        let shards = readers
            .into_iter()
            .map(|(name, reader)| Shard::open(name, reader, self.checksums))
            .collect::<Result<_>>()?;
        self.with_base(Model::new(shards, None)?)
    }

    /// Opens a container, the folder of a model, or the folder of a pipeline with all its
    /// components. A missing component is not an error: see [`Models::missing`].
    ///
    /// # Errors
    /// Like [`OpenOptions::open`]; [`Error::Parameter`] if a component is not the model that the
    /// pipeline's container lists.
    ///
    /// ```
    /// # fn main() -> df11::Result<()> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
    /// let models = df11::OpenOptions::new().open_all(&path)?;
    /// models.check_complete()?;
    /// for component in models.components() {
    ///     println!("{}: {} blocks", component.folder, component.model.blocks().len());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn open_all(&self, path: impl AsRef<Path>) -> Result<Models> {
        let root = path.as_ref();
        if let Some(name) = name_of(root) {
            let mut models = self.open_all_named(name)?;
            let components = models.components.drain(..);
            let with_base = |Component { folder, model, .. }| {
                Ok(Component::new(folder, self.with_base(model)?))
            };
            models.components = components.map(with_base).collect::<Result<_>>()?;
            return Ok(models);
        }
        check_installed(root)?;
        let list = root.join(PIPELINE);
        if !list.is_file() {
            return Ok(Models::alone(self.open(root)?));
        }
        let rest = Model::new(vec![self.shard(&list)?], Some(root.to_owned()))?;
        Models::of_pipeline(rest, |folder| {
            let place = root.join(folder);
            let is_there = place.is_dir() && !containers(&place)?.is_empty();
            is_there.then(|| self.open(&place)).transpose()
        })
    }

    /// The shards of a folder's model.
    fn shards(&self, folder: &Path) -> Result<Vec<Shard>> {
        let open = |paths: &[PathBuf]| paths.iter().map(|path| self.shard(path)).collect();
        let is_own = |path: &PathBuf| path.parent() == Some(folder);
        let shards = shards_of(containers(folder)?, is_own, open)?;
        Error::unless(!shards.is_empty(), || {
            let problem = format!("{} holds no .df11 file", folder.display());
            Error::parameter(problem, "name a container, or compress a model first")
        })?;
        check_places(folder, &shards)?;
        Ok(shards)
    }

    /// Opens a container that is a file.
    pub(super) fn shard(&self, path: &Path) -> Result<Shard> {
        let reader: Box<dyn ReadAt> =
            if self.memory_map { Box::new(map(path)?) } else { Box::new(FileReader::open(path)?) };
        #[cfg_attr(not(feature = "remote"), expect(unused_mut, reason = "as with the feature"))]
        let mut shard = Shard::open(path.to_owned(), reader, self.checksums)?;
        #[cfg(feature = "remote")]
        if self.in_memory && !self.memory_map {
            shard.bring_whole()?;
        }
        Ok(shard)
    }
}

/// Opens the containers of a folder: those that lie directly in it if they are all of a model's, or
/// else those in its subfolders too.
pub(super) fn shards_of<P>(
    paths: Vec<P>,
    is_own: impl Fn(&P) -> bool,
    open: impl Fn(&[P]) -> Result<Vec<Shard>>,
) -> Result<Vec<Shard>> {
    let (own, below): (Vec<_>, Vec<_>) = paths.into_iter().partition(is_own);
    let mut shards = open(&own)?;
    let count = |shard: &Shard| shard.directory().shard.shard_count.get();
    if shards.first().is_none_or(|first| count(first) > shards.len() as u64) {
        shards.extend(open(&below)?);
    }
    Ok(shards)
}

/// Refuses containers of another model, such as a trainer's checkpoint in a subfolder, which are
/// found if a model's folder has lost its own. A model's config lies above its weights.
fn check_places(folder: &Path, shards: &[Shard]) -> Result<()> {
    let has_config = |folder: &Path| folder.join("config.json").is_file();
    let is_own = |inner: &Path| {
        let mut files = shards.iter().flat_map(Shard::files);
        files.any(|file| file.is_weights() && Path::new(file.path()).starts_with(inner))
    };
    for shard in shards {
        let place = shard.path().parent().unwrap_or(folder);
        let inner = place.strip_prefix(folder).unwrap_or(Path::new(""));
        if place != folder && has_config(folder) && has_config(place) && !is_own(inner) {
            let problem = format!(
                "{} holds no container of its own, and {} is of another model",
                folder.display(),
                shard.path().display()
            );
            let remedy = format!("fetch or save it again, or name {}", place.display());
            return Err(Error::parameter(problem, remedy));
        }
    }
    Ok(())
}

/// A path that is the name of an object, or of several, beyond a network.
fn name_of(path: &Path) -> Option<&str> {
    path.to_str().filter(|name| scheme_of(name).is_some())
}

#[cfg(not(feature = "remote"))]
impl OpenOptions {
    #[expect(clippy::unused_self, reason = "as with the feature")]
    fn open_all_named(&self, name: &str) -> Result<Models> {
        Err(no_stores(name))
    }
}

/// A mapped file. Views come from the mapping; bulk copies are reads, which cost no page faults.
struct Mapped {
    map: memmap2::Mmap,
    file: FileReader,
}

impl ReadAt for Mapped {
    fn size(&self) -> u64 {
        self.map.len() as u64
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(offset, buf)
    }

    fn view(&self, offset: u64, length: u64) -> Option<&[u8]> {
        self.map.view(offset, length)
    }
}

/// Maps a whole file. The only unsafe code of the CPU path.
#[expect(unsafe_code, reason = "a mapping is as stable as its file")]
fn map(path: &Path) -> Result<Mapped> {
    let file = open_regular(path)?;
    // SAFETY: the mapping is read-only. All code that reads it accepts any bytes, bounds every
    // access by the length that was mapped, and decodes without relying on bytes that it read
    // before being the same (the directory is copied at once). The documented contract of
    // `open` says that nobody truncates the file meanwhile, as for every library that maps files
    // (memmap2, `Mmap`, section Safety).
    let map = unsafe { memmap2::Mmap::map(&file) };
    let map = map.map_err(|error| Error::io("mapping", path, error))?;
    Ok(Mapped { map, file: FileReader::new(path, file)? })
}

/// Whether [`open`] takes a path that [`Source::open`](crate::Source::open) does not: a container
/// by its name, a folder with containers and no safetensors file, or any name such as
/// `s3://bucket/model`, without a request to the store.
///
/// # Errors
/// [`Error::Io`] if the folder cannot be read; [`Error::Parameter`] if a save into it is in
/// progress or was interrupted.
pub fn is_compressed(path: impl AsRef<Path>) -> Result<bool> {
    let path = path.as_ref();
    if name_of(path).is_some() {
        return Ok(true);
    }
    if !path.is_dir() {
        return Ok(is_container(path));
    }
    let (found, _) = crate::source::walk(path)?;
    let mut paths = found.iter().map(|file| &file.path);
    Ok(paths.clone().any(is_container) && !paths.any(is_safetensors))
}

/// Refuses a file that is a container neither by its name nor by its first bytes.
fn check_kind(path: &Path) -> Result<()> {
    if is_container(path) {
        return Ok(());
    }
    let file = FileReader::open(path)?;
    let mut start = [0; MAGIC.len()];
    if file.size() >= start.len() as u64 {
        file.read_exact_at(0, &mut start).map_err(|error| Error::io("reading", path, error))?;
    }
    Error::unless(start == MAGIC, || {
        let problem = format!("{} is not a df11 container", path.display());
        let remedy = if path.to_str().is_some_and(is_safetensors) {
            "compress it first, or name a .df11 file"
        } else {
            "name a .df11 file, or the folder that holds it"
        };
        Error::parameter(problem, remedy)
    })
}

/// The error for a path that cannot be accessed; if the path is missing and looks like the name of
/// a repository, the error says how to get that.
fn or_fetch(path: &Path, error: io::Error) -> io::Error {
    let parts: Vec<_> = path.iter().filter_map(|part| part.to_str()).collect();
    let is_word =
        |part: &&str| part.chars().all(|char| char.is_ascii_alphanumeric() || "-_.".contains(char));
    if let [owner, name] = parts[..]
        && error.kind() == io::ErrorKind::NotFound
        && [owner, name].iter().all(is_word)
        && !is_container(name)
        && !Path::new(owner).exists()
    {
        let hint = format!(
            "no such path here; if it is a repository of the Hub, run hf download {owner}/{name} \
            --local-dir {name}"
        );
        return io_remedied(error.kind(), hint);
    }
    error
}

/// All containers below a folder, ascending by path.
pub(super) fn containers(folder: &Path) -> Result<Vec<PathBuf>> {
    let (found, left_out) = crate::source::walk(folder)?;
    let mut others = left_out.iter().filter(|other| other.reason != HIDDEN);
    if let Some(other) = others.find(|other| is_container(&other.path)) {
        let problem = format!("{}: {}", folder.join(&other.path).display(), other.reason);
        return Err(Error::parameter(problem, "fetch the file again, or remove it"));
    }
    Ok(found.into_iter().filter(|file| is_container(&file.path)).map(|file| file.file).collect())
}

/// The key of the metadata under which the components are listed: a JSON object of folders and
/// identities in hexadecimal digits.
const COMPONENTS: &str = "df11.components";

/// All models at a path.
#[derive(Debug)]
pub struct Models {
    components: Vec<Component<Model>>,
    missing: Vec<String>,
}

impl Models {
    /// A model that is not a component.
    pub(super) fn alone(model: Model) -> Self {
        Self { components: vec![Component::new("", model)], missing: Vec::new() }
    }

    /// The components that the container of a pipeline lists, and `rest`, the model of that
    /// container. `open` opens the model of a folder; `None` if there is none.
    pub(super) fn of_pipeline(
        rest: Model,
        open: impl Fn(&str) -> Result<Option<Model>>,
    ) -> Result<Self> {
        let list = &rest.shards()[0];
        let in_list = |error: Error| error.in_file(list.path());
        let listed = listed_components(list.directory())
            .map_err(in_list)?
            .ok_or_else(|| in_list(Error::corrupt("metadata", 0, "no components are listed")))?;
        let (mut components, mut missing) = (Vec::new(), Vec::new());
        for (folder, identity) in &listed {
            let Some(model) = open(folder)? else {
                missing.push(folder.clone());
                continue;
            };
            if model.identity().to_hex().as_str() != identity {
                let place = model.root().unwrap_or_default();
                let problem = format!("{} is another model than {PIPELINE} lists", place.display());
                return Err(Error::parameter(problem, "fetch the whole pipeline again"));
            }
            components.push(Component::new(folder, model));
        }
        components.push(Component::new("", rest.beside(listed.into_keys())));
        Ok(Self { components, missing })
    }

    /// The components that exist, ascending by folder, and the files that belong to none of them;
    /// or the one model.
    pub fn components(&self) -> &[Component<Model>] {
        &self.components
    }

    /// Folders of missing components, ascending.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Whether this is a pipeline.
    pub fn is_pipeline(&self) -> bool {
        self.components.len() > 1 || !self.missing.is_empty()
    }

    /// Refuses a pipeline that lacks components, and a model that lacks shards.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check_complete(&self) -> Result<()> {
        Error::unless(self.missing.is_empty(), || {
            let missing = self.missing.join(", ");
            let problem = format!("components of the pipeline are missing: {missing}");
            Error::parameter(problem, "fetch the rest")
        })?;
        self.components.iter().try_for_each(|component| {
            component.model.check_complete().map_err(|error| named(error, &component.folder))
        })
    }

    /// The only model, for callers that cannot take a pipeline.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a pipeline; `what` names the caller.
    pub fn single(mut self, what: &str) -> Result<Model> {
        match self.components.pop() {
            Some(component) if self.components.is_empty() && self.missing.is_empty() => {
                Ok(component.model)
            }
            _ => {
                let problem = format!("{what} takes one model, and this is a pipeline");
                Err(Error::parameter(problem, "name a component of it"))
            }
        }
    }
}

/// The value of the metadata that lists components, by their folders.
pub(crate) fn list_of_components(identities: &BTreeMap<String, String>) -> (String, String) {
    (COMPONENTS.to_owned(), serde_json::json!(identities).to_string())
}

/// Folders and identities that a directory lists, if it does.
pub(crate) fn listed_components(directory: &Directory) -> Result<Option<BTreeMap<String, String>>> {
    let mut metadata = directory.metadata();
    let Some((_, list)) = metadata.find(|(key, _)| *key == COMPONENTS) else { return Ok(None) };
    let invalid =
        |problem: String| Error::corrupt("metadata", 0, format!("{COMPONENTS}: {problem}"));
    let listed: BTreeMap<String, String> =
        serde_json::from_str(list).map_err(|error| invalid(error.to_string()))?;
    match listed.keys().find(|folder| check_path(folder).is_err() || folder.contains('/')) {
        Some(folder) => Err(invalid(format!("{folder:?} is not the name of a folder"))),
        None => Ok(Some(listed)),
    }
}
