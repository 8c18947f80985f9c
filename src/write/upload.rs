//! The objects of an output in a store: which may be replaced, and in which order new ones come.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Error, OpenOptions, Result,
    open::beside::is_card_with,
    paths::{CONFIG, MODEL_INDEX, PIPELINE, check_path, is_container, scheme_of, shown_name},
    progress::{Observer, Stage, advance},
    source::walk,
    store::{Patience, Place},
    temporary::{TemporaryFolder, folder_for_fetched},
};

/// An output in a store.
#[derive(Debug)]
pub(super) struct Remote {
    name: String,
    place: Place,
    folder: TemporaryFolder,
    overwrite: bool,
    /// Objects of an earlier output, by their paths.
    earlier: BTreeSet<String>,
}

impl Remote {
    pub(super) fn of(name: &str, overwrite: bool) -> Result<Self> {
        check_scheme(name)?;
        let name = name.trim_end_matches('/');
        let place = Place::of(name, Patience::DEFAULT)?;
        Error::unless(check_path(place.last_name()).is_ok(), || {
            Error::parameter(format!("{} names no folder", shown_name(name)), "add a path to it")
        })?;
        let folder = folder_for_fetched()?;
        let mut remote =
            Self { name: name.to_owned(), place, folder, overwrite, earlier: BTreeSet::new() };
        remote.earlier = remote.there()?;
        if !remote.earlier.is_empty() {
            remote.check_earlier()?;
        }
        Ok(remote)
    }

    /// Where the output is written first: the last part of its name goes into model cards.
    pub(super) fn local(&self) -> PathBuf {
        self.folder.path().join(self.place.last_name())
    }

    /// The paths of the objects that are there.
    fn there(&self) -> Result<BTreeSet<String>> {
        if self.place.is_file() {
            return Ok(self.place.has("")?.then(String::new).into_iter().collect());
        }
        Ok(self.place.files()?.unwrap_or_default().into_iter().collect())
    }

    /// Refuses objects that are no earlier output: neither containers, nor named by one, nor a
    /// model card.
    fn check_earlier(&self) -> Result<()> {
        Error::unless(self.overwrite, || Error::Exists { path: self.place.name_of("") })?;
        let mut known = BTreeSet::new();
        let opening = OpenOptions::new();
        for path in self.earlier.iter().filter(|path| path.is_empty() || is_container(path)) {
            for file in opening.recorded_at(&self.place, path)? {
                let folders = path.char_indices().filter(|&(_, char)| char == '/');
                let folders = folders.map(|(end, _)| &path[..=end]).chain([""]);
                known.extend(folders.map(|folder| format!("{folder}{file}")));
            }
            known.insert(path.clone());
        }
        let read = |path: &str, most| self.place.read_if_there(path, most).ok().flatten();
        let is_card = |path: &str| is_card_with(path, |most| read(path, most));
        let foreign = self.earlier.iter().find(|path| !known.contains(*path) && !is_card(path));
        foreign.map_or(Ok(()), |path| {
            let problem = format!("{} is no earlier output of df11", self.place.name_of(path));
            Err(Error::parameter(problem, "choose another output, or remove the object"))
        })
    }

    pub(super) fn publish(&self, observer: &dyn Observer) -> Result<()> {
        let files = self.files()?;
        let now = self.there()?;
        Error::unless(now.is_subset(&self.earlier), || Error::Exists {
            path: self.place.name_of(""),
        })?;
        observer.begin(files.iter().map(|file| file.length).sum());
        observer.enter(Stage::Upload);
        let mut put = Vec::new();
        let done = files.iter().try_for_each(|NewFile { path, file, .. }| {
            let replaces = self.earlier.contains(path);
            if !replaces {
                put.push(path);
            }
            self.place.put(path, file, replaces, |bytes| advance(observer, bytes))
        });
        let new: BTreeSet<_> = files.iter().map(|file| file.path.clone()).collect();
        let mut stale = self.earlier.difference(&new);
        let done = done.and_then(|()| stale.try_for_each(|path| self.place.remove(path)));
        if let Err(error) = done.and_then(|()| self.read_back()) {
            // The last one is another's if it took the name meanwhile.
            let own = if matches!(error, Error::Exists { .. }) { put.len() - 1 } else { put.len() };
            put[..own].iter().for_each(|path| drop(self.place.remove(path)));
            return Err(error);
        }
        Ok(())
    }

    /// The files to put, in their order.
    fn files(&self) -> Result<Vec<NewFile>> {
        let local = self.local();
        if self.place.is_file() {
            let length = fs::metadata(&local).map_err(|error| Error::io("opening", &local, error));
            return Ok(vec![NewFile { path: String::new(), file: local, length: length?.len() }]);
        }
        let (found, _) = walk(&local)?;
        let mut files: Vec<NewFile> = found
            .into_iter()
            .map(|found| NewFile { path: found.path, file: found.file, length: found.length })
            .collect();
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
            Error::corrupt("directory", 0, problem).in_file(self.place.name_of(""))
        })
    }
}

struct NewFile {
    path: String,
    file: PathBuf,
    length: u64,
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
