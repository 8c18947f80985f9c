//! Opens names of object stores, HTTP servers and the Hub.

use std::{
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
    opening::{Models, shards_of},
    options::OpenOptions,
    shard::Shard,
};
use crate::{
    Error, Result, parallel,
    paths::{PIPELINE, is_safetensors},
    source::MAX_SIDE_BYTES,
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
        let rest = rest.in_far_folder(FarFolder::new(place.clone()));
        Models::of_pipeline(rest, |folder| {
            let below =
                |path: &String| path.strip_prefix(folder)?.strip_prefix('/').map(str::to_owned);
            let own: Vec<String> = paths.iter().filter_map(below).collect();
            (!own.is_empty()).then(|| self.far_model(place.within(folder), &own)).transpose()
        })
    }

    /// The model of a folder.
    fn far_model(&self, place: Place, paths: &[String]) -> Result<Model> {
        let paths = paths.iter().map(String::as_str).collect();
        let is_own = |path: &&str| !path.contains('/');
        let shards = shards_of(paths, is_own, |paths| self.far_shards(&place, paths))?;
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
    parallel::first_cause(opened)
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
