//! Opening names of object stores, HTTP and the Hub.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use super::{
    far_folder::FarFolder,
    model::Model,
    opening::{Models, listed_components},
    options::OpenOptions,
    shard::Shard,
};
use crate::{Error, Result, parallel, paths::PIPELINE, source::Component, store::Place};

/// Containers of a place whose directories are read at once.
const OPENED_AT_ONCE: usize = 8;

impl OpenOptions {
    /// Opens what a name stands for: a container, or a folder with all its shards.
    pub(super) fn open_name(&self, name: &str) -> Result<Model> {
        let place = Arc::new(Place::of(name, self.patience)?);
        if place.is_file() {
            return Model::new(vec![self.far_shard(&place, "")?], None);
        }
        let paths = place.containers()?;
        if paths.iter().any(|path| path == PIPELINE) {
            let problem =
                format!("{} holds a pipeline, which is several models", place.name_of(""));
            let remedy = "name the folder of one of its components, or use what takes a pipeline";
            return Err(Error::parameter(problem, remedy));
        }
        self.far_model(&place, "", &paths)
    }

    /// As [`OpenOptions::open_name`], or all components of a pipeline.
    pub(super) fn open_all_named(&self, name: &str) -> Result<Models> {
        let place = Arc::new(Place::of(name, self.patience)?);
        let paths = if place.is_file() { Vec::new() } else { place.containers()? };
        if !paths.iter().any(|path| path == PIPELINE) {
            let model = match &*paths {
                [] => Model::new(vec![self.far_shard(&place, "")?], None)?,
                paths => self.far_model(&place, "", paths)?,
            };
            return Ok(Models::new(vec![Component::new("", model)], Vec::new()));
        }
        let rest = Model::new(vec![self.far_shard(&place, PIPELINE)?], None)?;
        let list = PathBuf::from(place.name_of(PIPELINE));
        let listed = listed_components(rest.shards()[0].directory())
            .map_err(|error| error.in_file(&list))?
            .ok_or_else(|| {
                Error::corrupt("metadata", 0, "no components are listed").in_file(&list)
            })?;
        let (mut components, missing) = self.far_components(&place, &listed, &paths)?;
        let rest = rest.beside(listed.into_keys()).in_far_folder(FarFolder::new(&place, ""));
        components.push(Component::new("", rest));
        Ok(Models::new(components, missing))
    }

    /// The components that are there, and the folders of those that are not.
    fn far_components(
        &self,
        place: &Arc<Place>,
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
            let model = self.far_model(place, &prefix, &own)?;
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
    fn far_model(&self, place: &Arc<Place>, prefix: &str, paths: &[String]) -> Result<Model> {
        let (own, below): (Vec<&String>, Vec<&String>) =
            paths.iter().partition(|path| !path.contains('/'));
        let mut shards = self.far_shards(place, prefix, &own)?;
        let count = |shard: &Shard| shard.directory().shard.shard_count.get();
        if shards.first().is_none_or(|first| count(first) > shards.len() as u64) {
            shards.extend(self.far_shards(place, prefix, &below)?);
        }
        Ok(Model::new(shards, None)?.in_far_folder(FarFolder::new(place, prefix)))
    }

    /// Opens some containers at once, since each waits for the network.
    fn far_shards(&self, place: &Place, prefix: &str, paths: &[&String]) -> Result<Vec<Shard>> {
        let open = |path: &&String| self.far_shard(place, &format!("{prefix}{path}"));
        let mut shards = Vec::with_capacity(paths.len());
        for some in paths.chunks(OPENED_AT_ONCE) {
            let opened: Vec<Result<Shard>> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    some.iter().map(|path| scope.spawn(move || open(path))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            shards.extend(opened.into_iter().collect::<Result<Vec<_>>>()?);
        }
        Ok(shards)
    }

    fn far_shard(&self, place: &Place, path: &str) -> Result<Shard> {
        self.try_far_shard(place, path).map_err(|error| match error {
            error @ Error::Corrupt { remedy: None, .. } => {
                error.remedied("open it again; if it is damaged in the store, upload it again")
            }
            other => other,
        })
    }

    fn try_far_shard(&self, place: &Place, path: &str) -> Result<Shard> {
        let (name, object) = (PathBuf::from(place.name_of(path)), place.object(path)?);
        if !self.in_memory {
            return Shard::open(name, Box::new(object), self.checksums);
        }
        // Header and directory first: no length is believed before they are right.
        let far = Shard::open(name.clone(), Box::new(object), self.checksums)?;
        let bytes = far.read_whole()?;
        Shard::open(name, Box::new(bytes), self.checksums)
    }
}

impl Shard {
    /// All bytes of the container, unchecked.
    fn read_whole(&self) -> Result<Vec<u8>> {
        let length = self.file_length();
        let _ahead = self.expect(&[0..length]);
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length as usize).map_err(|_| {
            let problem = format!("{} takes {length} bytes of memory", self.path().display());
            Error::parameter(problem, "fetch the container to a disk, and open it there")
        })?;
        for part in parallel::cut(0..length, WHOLE_PART_BYTES, 1) {
            bytes.resize(part.end as usize, 0);
            self.reader
                .read_exact_at(part.start, &mut bytes[part.start as usize..])
                .map_err(|error| Error::io("reading", self.path(), error))?;
        }
        Ok(bytes)
    }
}

/// Bytes that are copied at once of a container that goes to memory.
const WHOLE_PART_BYTES: u64 = 8 << 20;
