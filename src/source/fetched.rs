//! Local copies of models in stores. Compression reads its source two or three times, from all
//! threads and at any offset. So each byte is fetched once, to a temporary folder.
//!
//! ```text
//! listing → skeleton: side files, headers of weights, empty files for all others
//!         → Sources::open tells which weights it takes → these are filled
//! ```

use std::path::{Path, PathBuf};

use crate::{Error, Result, paths::is_far, progress::Observer, temporary::TemporaryFolder};

/// Which files of a model in a store are fetched whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WantedFiles<'a> {
    /// Files that [`Sources::open`](crate::Sources::open) takes: side files, and the weights of a
    /// variant, or the default ones.
    Variant(Option<&'a str>),
    /// Files that [`Sources::open_all_files`](crate::Sources::open_all_files) takes: all that are
    /// not hidden.
    AllFiles,
    /// Side files and the headers of weights; files of the right length stand for the rest.
    /// Checkpoints of the `DFloat11` package are fetched whole.
    Headers,
}

/// A local copy of a model in a store, removed when this is dropped; or the model's snapshot in the
/// cache of the Hub, which stays.
#[derive(Debug)]
pub struct FetchedSource {
    path: PathBuf,
    repository: Option<String>,
    notes: Vec<String>,
    _folder: Option<TemporaryFolder>,
}

impl FetchedSource {
    /// Fetches a model by the name of its folder, or of one safetensors file, such as
    /// `s3://bucket/model` or `hf://org/name@revision`. `None` if there are containers under the
    /// name, which is then already compressed.
    ///
    /// The copy lies in the system's temporary folder, whose free space is checked first. Each file
    /// is pinned by its `ETag`, a repository of the Hub by its commit. Memory is bounded as by
    /// reading a container. If the weights are complete in the cache of the Hub, they are read
    /// there without a request, except for a pipeline, whose components no index names.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for a name without weights, and if the
    /// temporary folder has too little space; [`Error::Io`](crate::Error::Io);
    /// [`Error::Cancelled`](crate::Error::Cancelled); those of `Sources::open`;
    /// [`Error::Unsupported`](crate::Error::Unsupported) without the feature `remote`.
    ///
    /// ```no_run
    /// use df11::{CompressOptions, Sources, compress_all, source::{FetchedSource, WantedFiles}};
    ///
    /// let wanted = WantedFiles::Variant(None);
    /// let fetched = FetchedSource::fetch("s3://models/Qwen3-8B", wanted, &())?;
    /// let source = fetched.expect("no containers");
    /// let sources = Sources::open(source.path(), None)?;
    /// compress_all(&sources, "Qwen3-8B-df11".as_ref(), &CompressOptions::new(), &())?;
    /// # Ok::<(), df11::Error>(())
    /// ```
    pub fn fetch(
        name: &str,
        wanted: WantedFiles<'_>,
        observer: &dyn Observer,
    ) -> Result<Option<Self>> {
        Error::unless(is_far(name.as_ref()), || {
            Error::parameter(format!("{name} is no name of a store"), "open it where it is")
        })?;
        remote::fetch(name, wanted, observer)
    }

    /// The folder or the file, for [`Sources::open`](crate::Sources::open).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its repository of the Hub, as `org/name`, if it is from there.
    pub fn repository(&self) -> Option<&str> {
        self.repository.as_deref()
    }

    /// Notes for the user on what was fetched, a sentence each.
    pub fn notes(&self) -> impl Iterator<Item = &str> {
        self.notes.iter().map(String::as_str)
    }
}

#[cfg(not(feature = "remote"))]
mod remote {
    use super::{FetchedSource, Observer, Result, WantedFiles};
    use crate::paths::no_stores;

    pub(super) fn fetch(
        name: &str,
        _: WantedFiles<'_>,
        _: &dyn Observer,
    ) -> Result<Option<FetchedSource>> {
        Err(no_stores(name))
    }
}

#[cfg(feature = "remote")]
mod remote {
    use std::{
        collections::{BTreeMap, BTreeSet},
        fs::{self, File, OpenOptions},
        io::Write as _,
        path::{Path, PathBuf},
        sync::Mutex,
    };

    use super::{FetchedSource, WantedFiles};
    use crate::{
        Error, Result,
        constants::HEAD_BYTES,
        io::ReadAt as _,
        parallel,
        paths::{
            MODEL_INDEX, RENAME, check_nameable, check_path, folder_of, is_container,
            is_safetensors, scheme_of, shard_path,
        },
        platform::{TEMPORARY, free_bytes},
        progress::{Observer, Stage, advance},
        source::{
            Component, dfloat11,
            folder::{Source, is_other_format},
            header::LENGTH_BYTES,
            hub_cache,
            pipeline::Sources,
            safetensors::MAX_HEADER_BYTES,
            walk::{MAX_SIDE_BYTES, walk},
        },
        store::{Content, Object, Patience, Place, Repository, STEMS},
        temporary::folder_for_fetched,
    };

    /// Bytes that are written at once.
    const PART_BYTES: u64 = 8 << 20;

    /// Side files to request from a folder on an HTTP server, which cannot be listed.
    const SIDE: [&str; 17] = [
        "LICENSE",
        "README.md",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    ];

    pub(super) fn fetch(
        name: &str,
        wanted: WantedFiles<'_>,
        observer: &dyn Observer,
    ) -> Result<Option<FetchedSource>> {
        let of_hub = scheme_of(name).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("hf"));
        let of_hub = of_hub.map(|(_, rest)| Repository::parse(rest)).transpose()?;
        if let Some(found) = of_hub.as_ref().and_then(|asked| cached(asked, wanted)) {
            return Ok(Some(found));
        }
        let place = Place::of(name.trim_end_matches('/'), Patience::DEFAULT)?;
        let Some((paths, notes)) = paths_of(&place)? else { return Ok(None) };
        let folder = folder_for_fetched()?;
        let repository = of_hub.map(|asked| asked.name);
        let own = match &repository {
            Some(repository) if !place.is_file() => repository.rsplit('/').next(),
            _ => Some(place.last_name()),
        };
        let own = own.filter(|own| check_path(own).is_ok()).unwrap_or("model");
        let path = folder.path().join(own);
        let mut copy = ModelCopy { place, root: path.clone(), wanted, objects: BTreeMap::new() };
        copy.skeleton(&paths)?;
        copy.fill(observer)?;
        Ok(Some(FetchedSource { path, repository, notes, _folder: Some(folder) }))
    }

    /// The snapshot in the cache of the Hub, if its weights are complete.
    fn cached(asked: &Repository, wanted: WantedFiles<'_>) -> Option<FetchedSource> {
        let variant = match wanted {
            WantedFiles::Variant(variant) => variant,
            WantedFiles::Headers => None,
            WantedFiles::AllFiles => return None,
        };
        let path = hub_cache::snapshot_of(&asked.name, &asked.revision)?.join(&asked.path);
        let sources = Sources::open(&path, variant).ok()?;
        if path.join(MODEL_INDEX).exists() || !sources.components().iter().all(is_whole) {
            return None;
        }
        let notes = vec![format!("the cache's snapshot {} was read", path.display())];
        Some(FetchedSource { path, repository: Some(asked.name.clone()), notes, _folder: None })
    }

    /// Whether a snapshot has all shards of its weights: with their index, opening has looked for
    /// them; without one a single shard looks like a model.
    fn is_whole(component: &Component<Source>) -> bool {
        let has_index = component.model.side.iter().any(|file| file.path.ends_with(".index.json"));
        has_index || !component.model.weights.iter().any(|file| file.path.contains("-of-"))
    }

    /// The files of a place, of which one file has the empty path, and notes on them. None if it is
    /// compressed already.
    fn paths_of(place: &Place) -> Result<Option<(Vec<String>, Vec<String>)>> {
        if place.is_file() {
            let is_compressed = is_container(place.last_name());
            return Ok((!is_compressed).then(|| (vec![String::new()], Vec::new())));
        }
        let Some(paths) = place.files()? else { return paths_behind_http(place) };
        if !paths.iter().any(is_safetensors) {
            let name = place.name_of("");
            return if paths.iter().any(is_container) { Ok(None) } else { Err(no_weights(&name)) };
        }
        let (paths, others) = paths.into_iter().partition::<Vec<_>, _>(|path| {
            // Some tools put an empty object in the place of a folder.
            check_path(path).is_ok() && check_nameable(path, RENAME).is_ok()
        });
        if let Some(path) = others.iter().find(|path| is_safetensors(path)) {
            let problem = format!("{path:?}: its name is not portable");
            return Err(Error::parameter(problem, "rename it in the store"));
        }
        let note = |path| format!("{path:?} was not fetched: its name is not portable");
        Ok(Some((paths, others.into_iter().map(note).collect())))
    }

    fn paths_behind_http(place: &Place) -> Result<Option<(Vec<String>, Vec<String>)>> {
        let index = place.index()?;
        let weights = if let Some((_, files)) = &index {
            files.clone()
        } else {
            let all = STEMS.map(|stem| format!("{stem}.safetensors"));
            let found = all.iter().find(|path| place.object(path).is_ok());
            found.or(all.first()).cloned().into_iter().collect()
        };
        let Some(first) = weights.first() else { return Err(no_weights(&place.name_of(""))) };
        if let Err(error) = place.object(first) {
            let is_compressed = place.object(&shard_path(first)).is_ok();
            return if is_compressed { Ok(None) } else { Err(error) };
        }
        if place.read_if_there(MODEL_INDEX, MAX_SIDE_BYTES)?.is_some() {
            let problem = format!("{} is a pipeline, and HTTP lists no files", place.name_of(""));
            return Err(Error::parameter(problem, "fetch it, or name the folder of a component"));
        }
        let side = SIDE.iter().map(|&path| path.to_owned());
        let all = weights.into_iter().chain(index.map(|(path, _)| path)).chain(side);
        let note =
            format!("HTTP lists no files: beside the weights were looked for {}", SIDE.join(", "));
        Ok(Some((all.collect(), vec![note])))
    }

    fn no_weights(name: &str) -> Error {
        let problem = format!("{name} holds no safetensors files");
        Error::parameter(problem, "name a .safetensors file or the folder of a model")
    }

    /// A copy that is made.
    struct ModelCopy<'a> {
        place: Place,
        /// The folder or the file.
        root: PathBuf,
        wanted: WantedFiles<'a>,
        /// Files of which the bytes are not here yet, by their paths.
        objects: BTreeMap<String, Object>,
    }

    impl ModelCopy<'_> {
        fn local(&self, path: &str) -> PathBuf {
            if path.is_empty() { self.root.clone() } else { self.root.join(path) }
        }

        /// Makes all files: side files whole, of weights the headers.
        fn skeleton(&mut self, paths: &[String]) -> Result<()> {
            let objects = Mutex::new(BTreeMap::new());
            let make = |(): &mut (), at: usize| {
                let path = &paths[at];
                if let Some(object) = self.make(path)? {
                    parallel::lock(&objects).insert(path.clone(), object);
                }
                Ok(())
            };
            parallel::for_each(paths.len(), || (), make)?;
            self.objects = objects.into_inner().unwrap_or_default();
            Ok(())
        }

        /// Makes a file. The object if bytes of it are missing.
        fn make(&self, path: &str) -> Result<Option<Object>> {
            if path.is_empty() || is_safetensors(path) {
                let object = self.place.object(path)?;
                self.write_header(path, &object)?;
                return Ok(Some(object));
            }
            let takes_all = self.wanted == WantedFiles::AllFiles;
            let is_hidden = path.split('/').any(|name| name.starts_with('.'));
            if is_hidden || !takes_all && is_other_format(path) {
                // It is left out by its name alone.
                return self.write(path, &[], 0).map(|()| None);
            }
            match self.place.content(path, MAX_SIDE_BYTES)? {
                Content::Missing => Ok(None),
                Content::Whole(bytes) => self.write(path, &bytes, 0).map(|()| None),
                Content::Larger(length) => {
                    self.write(path, &[], length)?;
                    takes_all.then(|| self.place.object(path)).transpose()
                }
            }
        }

        fn write_header(&self, path: &str, object: &Object) -> Result<()> {
            let size = object.size();
            let known = size.min(HEAD_BYTES);
            let mut bytes = vec![0; known as usize];
            let reading = |error| Error::io("fetching", self.place.name_of(path), error);
            object.read_exact_at(0, &mut bytes).map_err(reading)?;
            let length = bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            let end = LENGTH_BYTES.saturating_add(length);
            if length <= MAX_HEADER_BYTES && end <= size && end > known {
                bytes.resize(end as usize, 0);
                object.read_exact_at(known, &mut bytes[known as usize..]).map_err(reading)?;
            }
            self.write(path, &bytes, size)
        }

        /// Writes the first bytes of a file that has at least this length.
        fn write(&self, path: &str, bytes: &[u8], length: u64) -> Result<()> {
            let to = self.local(path);
            let written = fs::create_dir_all(to.parent().unwrap_or(&self.root))
                .and_then(|()| File::create_new(&to))
                .and_then(|mut file| {
                    file.write_all(bytes)?;
                    file.set_len(length.max(bytes.len() as u64))
                });
            written.map_err(|error| Error::io("writing", &to, error))
        }

        /// Fetches the bytes of the files that are wanted whole.
        fn fill(&self, observer: &dyn Observer) -> Result<()> {
            let coded = if self.root.is_dir() { self.coded()? } else { BTreeSet::new() };
            self.fetch_whole(&coded, observer)?;
            let rest = match self.wanted {
                WantedFiles::Headers => BTreeSet::new(),
                WantedFiles::Variant(variant) if self.root.is_dir() => {
                    self.taken(variant, &coded)?
                }
                _ => self.objects.keys().cloned().collect(),
            };
            self.fetch_whole(&rest.difference(&coded).cloned().collect(), observer)
        }

        /// Weights of checkpoints whose arrays tell what tensors they are.
        fn coded(&self) -> Result<BTreeSet<String>> {
            let folders = dfloat11::folders(&walk(&self.root)?.0);
            let paths = self.objects.keys();
            Ok(paths.filter(|path| folders.contains(folder_of(path))).cloned().collect())
        }

        /// The weights that compression will read, except those of `coded` folders, of which a file
        /// stands for several.
        fn taken(
            &self,
            variant: Option<&str>,
            coded: &BTreeSet<String>,
        ) -> Result<BTreeSet<String>> {
            let sources = Sources::open(&self.root, variant)?;
            let components = sources.components().iter();
            let all = components.flat_map(|component| {
                component.model.weights.iter().map(|file| component.path_of(&file.path))
            });
            let joined: BTreeSet<&str> = coded.iter().map(|path| folder_of(path)).collect();
            let (here, others): (BTreeSet<_>, BTreeSet<_>) =
                all.partition(|path| self.objects.contains_key(path));
            // Some disks take two names for one: then a file would keep its zeros.
            match others.iter().find(|path| !joined.contains(folder_of(path))) {
                None => Ok(here),
                Some(path) => {
                    let problem = format!("the temporary folder has {path:?} under another name");
                    let remedy = format!("set {TEMPORARY} to a folder on another disk");
                    Err(Error::parameter(problem, remedy))
                }
            }
        }

        fn fetch_whole(&self, paths: &BTreeSet<String>, observer: &dyn Observer) -> Result<()> {
            let sizes = paths.iter().map(|path| self.objects[path].size());
            let bytes = sizes.fold(0, u64::saturating_add);
            self.check_space(bytes)?;
            if !paths.is_empty() {
                observer.begin(bytes);
                observer.enter(Stage::Fetch);
            }
            paths.iter().try_for_each(|path| self.fetch_file(path, observer))
        }

        fn check_space(&self, bytes: u64) -> Result<()> {
            let folder = self.root.parent().unwrap_or(Path::new("."));
            let free =
                free_bytes(folder).map_err(|error| Error::io("looking at", folder, error))?;
            Error::unless(bytes <= free, || {
                let (name, folder) = (self.place.name_of(""), std::env::temp_dir());
                let problem = format!(
                    "{name} takes {bytes} bytes, and {} has {free} bytes free",
                    folder.display()
                );
                let remedy = format!("set {TEMPORARY} to a folder on a disk with more space");
                Error::parameter(problem, remedy)
            })
        }

        fn fetch_file(&self, path: &str, observer: &dyn Observer) -> Result<()> {
            let (object, to) = (&self.objects[path], self.local(path));
            let writing = |error| Error::io("writing", &to, error);
            let mut file = OpenOptions::new().write(true).open(&to).map_err(writing)?;
            let _ahead = object.read_ahead(&[0..object.size()]);
            let mut bytes = Vec::new();
            parallel::cut(0..object.size(), PART_BYTES, 1).try_for_each(|part| {
                bytes.resize((part.end - part.start) as usize, 0);
                object
                    .read_exact_at(part.start, &mut bytes)
                    .map_err(|error| Error::io("fetching", self.place.name_of(path), error))?;
                file.write_all(&bytes).map_err(writing)?;
                advance(observer, bytes.len() as u64)
            })
        }
    }
}
