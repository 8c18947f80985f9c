//! Opens names of object stores, HTTP servers and the Hub.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    cache::{Cache, CacheFolder},
    far_folder::FarFolder,
    model::Model,
    opening::{Models, listed_components},
    options::OpenOptions,
    shard::Shard,
};
use crate::{
    Error, Result,
    paths::{PIPELINE, is_safetensors},
    source::{Component, MAX_SIDE_BYTES},
    store::{Place, end_waits_with},
};

/// Containers of a place that are opened at once.
const OPENED_AT_ONCE: usize = 8;

impl OpenOptions {
    /// Opens what a name stands for: a container, a folder with all its shards, or all components
    /// of a pipeline.
    pub(super) fn open_all_named(&self, name: &str) -> Result<Models> {
        let place = Place::of(name, self.patience)?;
        if place.is_file() {
            Error::unless(!is_safetensors(place.last_name()), || {
                let problem = format!("{} is not a df11 container", place.name_of(""));
                Error::parameter(problem, "compress it first, or name a .df11 file")
            })?;
            let shards = self.far_shards(&place, &[""])?;
            return Ok(Models::alone(Model::new(shards, None)?));
        }
        let paths = place.containers()?;
        if !paths.iter().any(|path| path == PIPELINE) {
            return Ok(Models::alone(self.far_model(place, &paths)?));
        }
        let rest = Model::new(self.far_shards(&place, &[PIPELINE])?, None)?;
        let list = PathBuf::from(place.name_of(PIPELINE));
        let listed = listed_components(rest.shards()[0].directory())
            .map_err(|error| error.in_file(&list))?
            .ok_or_else(|| {
                Error::corrupt("metadata", 0, "no components are listed").in_file(&list)
            })?;
        let (mut components, missing) = self.far_components(&place, &listed, &paths)?;
        let rest = rest.beside(listed.into_keys()).in_far_folder(FarFolder::new(place));
        components.push(Component::new("", rest));
        Ok(Models::new(components, missing))
    }

    /// The components that are there, and the folders of those that are not.
    fn far_components(
        &self,
        place: &Place,
        listed: &BTreeMap<String, String>,
        paths: &[String],
    ) -> Result<(Vec<Component<Model>>, Vec<String>)> {
        let (mut components, mut missing) = (Vec::new(), Vec::new());
        for (folder, identity) in listed {
            let prefix = format!("{folder}/");
            let own = paths.iter().filter_map(|path| path.strip_prefix(&prefix));
            let own: Vec<String> = own.map(str::to_owned).collect();
            if own.is_empty() {
                missing.push(folder.clone());
                continue;
            }
            let model = self.far_model(place.within(folder), &own)?;
            if model.identity().to_hex().as_str() != identity {
                let name = place.name_of(folder);
                let problem = format!("{name} is another model than {PIPELINE} lists");
                return Err(Error::parameter(problem, "fetch the whole pipeline again"));
            }
            components.push(Component::new(folder, model));
        }
        Ok((components, missing))
    }

    /// The model of a folder: the containers that lie directly in it if they are all of a model's,
    /// or else those in its subfolders too.
    fn far_model(&self, place: Place, paths: &[String]) -> Result<Model> {
        let (own, below): (Vec<&str>, Vec<&str>) =
            paths.iter().map(String::as_str).partition(|path| !path.contains('/'));
        let mut shards = self.far_shards(&place, &own)?;
        let count = |shard: &Shard| shard.directory().shard.shard_count.get();
        if shards.first().is_none_or(|first| count(first) > shards.len() as u64) {
            shards.extend(self.far_shards(&place, &below)?);
        }
        Ok(Model::new(shards, None)?.in_far_folder(FarFolder::new(place)))
    }

    /// Opens some containers at once, since each waits for the network.
    fn far_shards(&self, place: &Place, paths: &[&str]) -> Result<Vec<Shard>> {
        let (mut shards, kept) = (Vec::with_capacity(paths.len()), Arc::default());
        let cache = match &self.cache {
            Some(cache) => Some(cache.clone()),
            None => CacheFolder::chosen()?,
        };
        let cache = cache.map(Cache::open).transpose()?.map(Arc::new);
        for some in paths.chunks(OPENED_AT_ONCE) {
            let mut opened = at_once(some, |path| self.far_shard(place, path))?;
            for shard in &mut opened {
                shard.kept = Arc::clone(&kept);
                shard.cache.clone_from(&cache);
            }
            // No length is believed before header and directory are right.
            if self.in_memory {
                // The first ones are fetched first.
                opened.iter_mut().try_for_each(Shard::bring_whole)?;
            }
            shards.extend(opened);
        }
        Ok(shards)
    }

    fn far_shard(&self, place: &Place, path: &str) -> Result<Shard> {
        let name = PathBuf::from(place.name_of(path));
        Shard::open(name, Box::new(place.object(path)?), self.checksums)
    }

    /// Fetches the side files of what a name stands for, a model or a pipeline, into a local
    /// folder: those that the containers record, and `others` beside them, as far as they are
    /// there.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a name that is not a folder's or lacks containers; those of
    /// [`OpenOptions::open`].
    #[doc(hidden)]
    pub fn fetch_side_files(&self, name: &str, folder: &Path, others: &[String]) -> Result<()> {
        let models = self.open_all_named(name)?;
        models.check_complete()?;
        models.components().iter().try_for_each(|component| {
            let (model, into) = (&component.model, folder.join(&component.folder));
            let far = model.far_folder().ok_or_else(|| {
                let problem = format!("{} is one container", model.shards()[0].path().display());
                Error::parameter(problem, "name a folder of containers")
            })?;
            far.fetch_recorded(model.files_beside(), &into)?;
            others.iter().try_for_each(|path| far.fetch_file(path, MAX_SIDE_BYTES, &into))
        })
    }
}

/// Opens each in a thread of its own. The first error ends the others.
fn at_once<T: Sync>(some: &[T], open: impl Fn(&T) -> Result<Shard> + Sync) -> Result<Vec<Shard>> {
    let is_over = Arc::new(AtomicBool::new(false));
    let open = |each: &T| {
        let opened = end_waits_with(&is_over, || advised(open(each)));
        is_over.fetch_or(opened.is_err(), Ordering::Relaxed);
        opened
    };
    let opened: Vec<Result<Shard>> = std::thread::scope(|scope| {
        let threads: Vec<_> = some.iter().map(|each| scope.spawn(|| open(each))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let is_cause =
        |opened: &Result<Shard>| matches!(opened, Err(error) if !matches!(error, Error::Cancelled));
    let (causes, others): (Vec<_>, Vec<_>) = opened.into_iter().partition(is_cause);
    causes.into_iter().chain(others).collect()
}

/// The same, with advice for a container that is damaged.
fn advised<T>(opened: Result<T>) -> Result<T> {
    opened.map_err(|error| match error {
        error @ Error::Corrupt { remedy: None, .. } => {
            error.remedied("open it again; if it is damaged in the store, upload it again")
        }
        other => other,
    })
}
