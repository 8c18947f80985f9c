//! The objects of an output in a store, and their order. Nothing there is replaced: a store cannot
//! rename folders, so an earlier output would be gone before the new one is complete.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::{
    Error, OpenOptions, Result,
    paths::{
        CONFIG, MODEL_INDEX, PIPELINE, check_path, is_container, is_safetensors, scheme_of,
        shown_name,
    },
    progress::{Observer, Stage, advance},
    source::{SideFile, walk},
    store::{Patience, Place},
    temporary::{TemporaryFolder, folder_for_fetched},
};

/// How long an output that failed is taken away.
const WITHDRAWAL: Duration = Duration::from_secs(20);

/// An output in a store.
#[derive(Debug)]
pub(super) struct Remote {
    name: String,
    place: Place,
    folder: TemporaryFolder,
}

impl Remote {
    pub(super) fn of(name: &str) -> Result<Self> {
        check_scheme(name)?;
        let name = name.trim_end_matches('/');
        let place = Place::of(name, Patience::DEFAULT)?;
        Error::unless(check_path(place.last_name()).is_ok(), || {
            Error::parameter(format!("{} names no folder", shown_name(name)), "add a path to it")
        })?;
        Error::unless(!is_safetensors(place.last_name()), || {
            let problem = format!("{} would be a container", place.name_of(""));
            Error::parameter(problem, "end its name in .df11")
        })?;
        let remote = Self { name: name.to_owned(), place, folder: folder_for_fetched()? };
        remote.check_free()?;
        Ok(remote)
    }

    /// Where the output is written first: the last part of its name goes into model cards.
    pub(super) fn local(&self) -> PathBuf {
        self.folder.path().join(self.place.last_name())
    }

    /// Refuses a name that has objects.
    fn check_free(&self) -> Result<()> {
        let is_there = if self.place.is_file() {
            self.place.has("")?
        } else {
            self.place.files()?.is_some_and(|files| !files.is_empty())
        };
        Error::unless(!is_there, || {
            let problem = format!("{} exists, and nothing in a store is replaced", self.name());
            Error::parameter(problem, "choose another name, or remove it with the store's own tool")
        })
    }

    fn name(&self) -> String {
        self.place.name_of("")
    }

    pub(super) fn publish(&self, observer: &dyn Observer) -> Result<()> {
        let files = self.files()?;
        self.check_free()?;
        observer.begin(files.iter().map(|file| file.length).sum());
        observer.enter(Stage::Upload);
        for (at, SideFile { path, file, .. }) in files.iter().enumerate() {
            let put = self.place.put(path, file, |bytes| advance(observer, bytes));
            if let Err(error) = put {
                // An object that failed may be another's.
                self.withdraw(&files[..at]);
                return Err(error);
            }
        }
        self.read_back()
    }

    /// Removes objects, the last ones first.
    fn withdraw(&self, files: &[SideFile]) {
        let end = Instant::now() + WITHDRAWAL;
        let files = files.iter().rev().take_while(|_| Instant::now() < end);
        files.for_each(|file| drop(self.place.remove(&file.path)));
    }

    /// The files to put, in their order.
    fn files(&self) -> Result<Vec<SideFile>> {
        let local = self.local();
        if self.place.is_file() {
            let length = fs::metadata(&local).map_err(|error| Error::io("opening", &local, error));
            return Ok(vec![SideFile { path: String::new(), file: local, length: length?.len() }]);
        }
        let (found, _) = walk(&local)?;
        let mut files: Vec<SideFile> = found.into_iter().map(Into::into).collect();
        files.sort_by_cached_key(|file| (rank(&file.path), file.path.clone()));
        Ok(files)
    }

    /// Opens what is there now: it is the model that was written.
    fn read_back(&self) -> Result<()> {
        let options = OpenOptions::new().memory_map(false);
        let identities = |name: &Path| -> Result<Vec<_>> {
            let models = options.open_all(name)?;
            models.check_complete()?;
            Ok(models.components().iter().map(|each| each.model.identity()).collect())
        };
        let found = identities(Path::new(&self.name))?;
        Error::unless(found == identities(&self.local())?, || {
            let problem = "the store has another model than was put there";
            Error::corrupt("directory", 0, problem).in_file(self.name())
        })
    }
}

/// The order in which files come: containers, files beside them, and those by which a folder is
/// known as a model's or a pipeline's.
fn rank(path: &str) -> u8 {
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_last = name.ends_with(".index.json") || [CONFIG, MODEL_INDEX, PIPELINE].contains(&name);
    if is_last { 2 } else { u8::from(!is_container(path)) }
}

fn check_scheme(name: &str) -> Result<()> {
    let scheme = scheme_of(name).map_or("", |(scheme, _)| scheme).to_ascii_lowercase();
    let remedy = match &*scheme {
        "http" | "https" => "write it here, and upload it with the tool of the server",
        "hf" => "write it here, and upload it with hf upload ORG/NAME FOLDER",
        _ => return Ok(()),
    };
    Err(Error::parameter(format!("{} takes no output", shown_name(name)), remedy))
}

#[cfg(test)]
mod tests {
    use super::rank;

    #[test]
    fn containers_come_first_and_the_index_last() {
        let mut paths = [
            "config.json",
            "model.safetensors.index.json",
            "pipeline.df11",
            "tokenizer.json",
            "unet/config.json",
            "unet/model.df11",
        ];
        paths.sort_by_key(|path| rank(path));
        assert_eq!(paths[..2], ["unet/model.df11", "tokenizer.json"]);
    }
}
