//! A place: a file, or a folder with everything in it, and its store.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    io::ErrorKind,
    path::Path,
    sync::Arc,
};

use object_store::{
    ClientConfigKey, ClientOptions, HeaderMap, HeaderValue, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
};
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::{
    ahead::Queues,
    arrival::Arrivals,
    client::Connector,
    fetch::{MAX_REQUESTS, ObjectSource, Patience},
    hub::{self, Repository, Revision},
    name::Name,
    object::{Object, path_of, read_small, read_up_to, wait},
    runtime,
    upload::{Store, UploadTarget, length_of},
};
use crate::{
    Error, Result,
    constants::MAX_SHARDS,
    paths::{check_path, is_container, is_safetensors, shard_path},
};

/// The longest index of a folder on an HTTP server, in bytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Names of weights, without endings, to request from folders on HTTP servers.
pub(crate) const STEMS: [&str; 2] = ["model", "diffusion_pytorch_model"];

/// A file or a folder of a store.
#[derive(Clone)]
pub(crate) struct Place {
    store: Arc<dyn ObjectStore>,
    /// The same, if it takes objects.
    written: Option<Arc<dyn Store>>,
    /// Where it is in the store; empty for all of it.
    path: String,
    /// Its name for messages.
    shown: String,
    is_file: bool,
    listing: Listing,
    patience: Patience,
    requests: Arc<Semaphore>,
    queues: Arc<Queues>,
    arrivals: Arc<Arrivals>,
}

/// Stores print their passwords and keys, so a place prints its name alone.
impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("name", &self.shown).finish_non_exhaustive()
    }
}

/// How a folder tells what it has.
#[derive(Clone)]
enum Listing {
    /// The store lists.
    Store,
    /// The Hub has listed them: paths from the root of the repository.
    Told(Vec<String>),
    /// Nothing lists them; the index of a sharded model names its weights files.
    Index,
}

/// The content of a file.
pub(crate) enum Content {
    Missing,
    Whole(Vec<u8>),
    /// A file of this many bytes, which were not fetched.
    Larger(u64),
}

impl Place {
    /// Finds a place. Of the Hub this is one request, of all others none.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a name or settings that no store takes; [`Error::Io`].
    pub(crate) fn of(name: &str, patience: Patience) -> Result<Self> {
        let name = Name::parse(name)?;
        match &*name.scheme {
            "hf" => Self::of_hub(&name, patience),
            "http" | "https" => {
                let is_file = name.path.contains('?') || is_one(name.bare_path());
                let login = name.login.as_deref();
                let store = http(name.full.trim_end_matches('/'), &name.shown(), login)?;
                Ok(Self::new(store, &name, Listing::Index, patience).at("", is_file))
            }
            _ => {
                let path = name.path.trim_matches('/');
                let store = bucket(&name)?;
                let place = Self::new(Arc::clone(&store) as _, &name, Listing::Store, patience);
                Ok(Self { written: Some(store), ..place.at(path, is_one(path)) })
            }
        }
    }

    fn new(store: Arc<dyn ObjectStore>, name: &Name, listing: Listing, patience: Patience) -> Self {
        let shown = name.shown().trim_end_matches('/').to_owned();
        let requests = Arc::new(Semaphore::new(MAX_REQUESTS));
        Self {
            store,
            written: None,
            path: String::new(),
            shown,
            is_file: false,
            listing,
            patience,
            requests,
            queues: Arc::default(),
            arrivals: Arc::default(),
        }
    }

    fn at(self, path: &str, is_file: bool) -> Self {
        Self { path: path.to_owned(), is_file, ..self }
    }

    fn of_hub(name: &Name, patience: Patience) -> Result<Self> {
        hub::check_online()?;
        let repository = Repository::parse(&format!("{}/{}", name.root, name.path))?;
        let token = hub::token().map(|token| format!("Bearer {token}"));
        let shown = name.shown();
        let asked = http(&repository.api(), &shown, token.as_deref())?;
        let asked = Self::new(asked, name, Listing::Index, patience);
        let answer = read_small(&asked.source("")?, &shown, hub::MAX_ANSWER_BYTES)?;
        let revision = Revision::parse(&answer, &shown)?;
        let store = http(&repository.files(&revision), &shown, token.as_deref())?;
        let told = Listing::Told(revision.paths().map(str::to_owned).collect());
        let is_file = is_one(&repository.path);
        Ok(Self::new(store, name, told, patience).at(&repository.path, is_file))
    }

    /// Whether it is one container, or one file of weights.
    pub(crate) fn is_file(&self) -> bool {
        self.is_file
    }

    /// The last part of its name.
    pub(crate) fn last_name(&self) -> &str {
        self.shown.rsplit('/').next().unwrap_or(&self.shown)
    }

    /// The name of what it has at a path, for messages.
    pub(crate) fn name_of(&self, path: &str) -> String {
        join(&self.shown, path)
    }

    /// The object at a path below the place; of a file the path is empty. One request.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn object(&self, path: &str) -> Result<Object> {
        let shared = (Arc::clone(&self.queues), Arc::clone(&self.arrivals));
        Object::open(self.source(path)?, shared, &self.name_of(path))
    }

    /// A folder in this one.
    pub(crate) fn within(&self, folder: &str) -> Self {
        let (shown, path) = (self.name_of(folder), join(&self.path, folder));
        Self { path, shown, ..self.clone() }
    }

    /// All bytes of a small file at a path below the place; None if there is no such file. One
    /// request.
    ///
    /// # Errors
    /// [`Error::Io`], also if it has more than `most`.
    pub(crate) fn read_if_there(&self, path: &str, most: u64) -> Result<Option<Vec<u8>>> {
        match read_small(&self.source(path)?, &self.name_of(path), most) {
            Err(error) if is_missing(&error) => Ok(None),
            found => found.map(Some),
        }
    }

    /// The content of a file at a path below the place that may have more than `most` bytes. One
    /// request.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn content(&self, path: &str, most: u64) -> Result<Content> {
        match read_up_to(&self.source(path)?, &self.name_of(path), most) {
            Ok(Ok(bytes)) => Ok(Content::Whole(bytes)),
            Ok(Err(length)) => Ok(Content::Larger(length)),
            Err(error) if is_missing(&error) => Ok(Content::Missing),
            Err(error) => Err(error),
        }
    }

    /// Puts a file at a path below the place where nothing is. Tells how many bytes more were sent,
    /// and ends if the answer to that is an error.
    ///
    /// # Errors
    /// [`Error::Exists`]; [`Error::Io`]; [`Error::Cancelled`]; [`Error::Parameter`] if the store
    /// only reads; that of `advance`.
    pub(crate) fn put(
        &self,
        path: &str,
        file: &Path,
        advance: impl FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.target(path)?.put(file, advance)
    }

    /// Removes the object at a path below the place.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Parameter`] if the store only reads.
    pub(crate) fn remove(&self, path: &str) -> Result<()> {
        self.target(path)?.remove()
    }

    fn target(&self, path: &str) -> Result<UploadTarget> {
        let store = self.written.clone().ok_or_else(|| {
            let problem = format!("{} cannot be written to", self.shown);
            Error::parameter(problem, "name a folder here, and upload it with another tool")
        })?;
        let ObjectSource { path: at, patience, .. } = self.source(path)?;
        Ok(UploadTarget { store, path: at, patience, name: self.name_of(path) })
    }

    /// Whether there is an object at a path below the place. One request.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn has(&self, path: &str) -> Result<bool> {
        let found = length_of(&self.source(path)?);
        let found = found.map_err(|error| Error::io("looking at", self.name_of(path), error))?;
        Ok(found.is_some())
    }

    fn source(&self, path: &str) -> Result<ObjectSource> {
        let path = path_of(&join(&self.path, path))?;
        let (store, requests) = (Arc::clone(&self.store), Arc::clone(&self.requests));
        Ok(ObjectSource { store, path, patience: self.patience, requests })
    }

    /// The paths of the containers in a folder, ascending. One request, or one for some thousand
    /// objects.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Parameter`] if there are none, or nothing tells which;
    /// [`Error::Limit`] for more than a model has.
    pub(crate) fn containers(&self) -> Result<Vec<String>> {
        let paths = self.all_containers()?;
        let what = format_args!("the number of containers of {}", self.shown);
        Error::check_limit(what, paths.len() as u64, MAX_SHARDS)?;
        Ok(paths)
    }

    fn all_containers(&self) -> Result<Vec<String>> {
        let Some(mut paths) = self.files()? else { return self.indexed() };
        let is_seen = |path: &str| !path.split('/').any(|part| part.starts_with('.'));
        paths.retain(|path| is_container(path) && is_seen(path) && check_path(path).is_ok());
        paths.sort_unstable();
        Error::unless(!paths.is_empty(), || {
            let problem = format!("{} holds no .df11 file", self.shown);
            Error::parameter(problem, "name a container, or put one there")
        })?;
        Ok(paths)
    }

    /// The paths of all files of a folder, ascending; None if nothing lists them, as on an HTTP
    /// server.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Limit`] for more than a model has.
    pub(crate) fn files(&self) -> Result<Option<Vec<String>>> {
        let mut paths: Vec<String> = match &self.listing {
            Listing::Index => return Ok(None),
            Listing::Told(paths) => paths.iter().filter_map(|path| self.below(path)).collect(),
            Listing::Store => self.listed()?,
        };
        let what = format_args!("the number of files of {}", self.shown);
        Error::check_limit(what, paths.len() as u64, 2 * MAX_SHARDS)?;
        paths.sort_unstable();
        Ok(Some(paths))
    }

    /// The rest of an object's path after the place, if it lies there.
    fn below(&self, path: &str) -> Option<String> {
        if self.path.is_empty() {
            return Some(path.to_owned());
        }
        Some(path.strip_prefix(&self.path)?.strip_prefix('/')?.to_owned())
    }

    fn listed(&self) -> Result<Vec<String>> {
        let source = self.source("")?;
        let found = wait(runtime::handle()?, async move { source.list().await });
        let found = found.map_err(|error| Error::io("listing", &self.shown, error))?;
        Ok(found.iter().filter_map(|path| self.below(path)).collect())
    }

    /// The containers of a folder on an HTTP server.
    fn indexed(&self) -> Result<Vec<String>> {
        let files = self.index()?.map(|(_, files)| files);
        let files = files.unwrap_or_else(|| [format!("{}.safetensors", STEMS[0])].into());
        Ok(files.iter().map(|path| shard_path(path)).collect())
    }

    /// The index of the weights files of a folder that cannot be listed, and the files that it
    /// names.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Corrupt`].
    pub(crate) fn index(&self) -> Result<Option<(String, BTreeSet<String>)>> {
        #[derive(Deserialize)]
        struct WeightIndex {
            weight_map: BTreeMap<String, String>,
        }
        for stem in STEMS {
            let name = format!("{stem}.safetensors.index.json");
            let Some(bytes) = self.read_if_there(&name, MAX_INDEX_BYTES)? else { continue };
            let index: WeightIndex = serde_json::from_slice(&bytes)
                .map_err(|error| Error::corrupt(self.name_of(&name), 0, error))?;
            let files: BTreeSet<_> = index.weight_map.into_values().collect();
            let what = format_args!("the number of files that {} names", self.name_of(&name));
            Error::check_limit(what, files.len() as u64, MAX_SHARDS)?;
            files.iter().try_for_each(|path| check_path(path))?;
            return Ok(Some((name, files)));
        }
        Ok(None)
    }
}

fn is_missing(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == ErrorKind::NotFound)
}

/// Whether a path is that of one file, and no folder's.
fn is_one(path: &str) -> bool {
    is_container(path) || is_safetensors(path)
}

/// Two parts of a path, of which either may be empty.
fn join(folder: &str, path: &str) -> String {
    let parts = [folder, path].into_iter().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("/")
}

/// Retries are those of [`ObjectSource::fetch`].
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// Settings of every client: the time of a whole request is bounded by its progress alone.
fn settings() -> [(ClientConfigKey, &'static str); 3] {
    [
        (ClientConfigKey::Timeout, "1 day"),
        (ClientConfigKey::ConnectTimeout, "10 seconds"),
        (ClientConfigKey::UserAgent, concat!("df11/", env!("CARGO_PKG_VERSION"))),
    ]
}

/// The objects below a URL. `login` is the value of the header `Authorization`.
fn http(url: &str, shown: &str, login: Option<&str>) -> Result<Arc<dyn ObjectStore>> {
    let mut options = ClientOptions::new().with_allow_http(url.starts_with("http://"));
    if let Some(login) = login {
        let mut value = HeaderValue::try_from(login).map_err(|_| {
            Error::parameter("the token has a character that no token has", "log in")
        })?;
        value.set_sensitive(true);
        let mut headers = HeaderMap::new();
        headers.insert("authorization", value);
        options = options.with_default_headers(headers);
    }
    let mut builder = HttpBuilder::new().with_url(url).with_client_options(options);
    for (key, value) in settings() {
        builder = builder.with_config(key, value);
    }
    let store = builder.with_retry(no_retries()).with_http_connector(Connector).build();
    Ok(Arc::new(store.map_err(|_| refused(shown))?))
}

/// A bucket, with the settings and credentials that the environment has.
fn bucket(name: &Name) -> Result<Arc<dyn Store>> {
    macro_rules! built {
        ($builder:expr, $key:path) => {{
            let mut builder = $builder.with_retry(no_retries()).with_http_connector(Connector);
            for (key, value) in settings() {
                builder = builder.with_config($key(key), value);
            }
            Arc::new(builder.build().map_err(|_| refused(&name.shown()))?) as Arc<dyn Store>
        }};
    }
    let root = &*name.root;
    Ok(match &*name.scheme {
        "s3" => {
            let mut builder = AmazonS3Builder::from_env().with_bucket_name(root);
            let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
            if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
                builder = builder.with_allow_http(true);
            }
            built!(builder, AmazonS3ConfigKey::Client)
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(root);
            built!(builder, GoogleConfigKey::Client)
        }
        _ => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(root);
            built!(builder, AzureConfigKey::Client)
        }
    })
}

/// The error of a store that cannot be spoken to: settings can hold secrets, so it names none.
fn refused(shown: &str) -> Error {
    let problem = format!("{shown} cannot be asked: its name or the settings of the environment");
    Error::parameter(problem, "check both, such as region, endpoint and account")
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        net::TcpListener,
        time::Duration,
    };

    use super::*;

    const LISTED: &str = "<ListBucketResult><Contents><Key>m/x.df11</Key><Size>1</Size>\
        <LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>";

    /// A server that answers so, one connection after the other; its URL.
    fn server(answers: &'static [(u16, &'static str)]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for ((status, body), stream) in answers.iter().zip(listener.incoming()) {
                let mut stream = stream.unwrap();
                let request = BufReader::new(&stream).lines();
                request.take_while(|line| !line.as_ref().unwrap().is_empty()).for_each(drop);
                let length = body.len();
                let head = "Connection: close\r\nContent-Type: application/xml";
                let head = format!("HTTP/1.1 {status} X\r\n{head}\r\nContent-Length: {length}");
                write!(stream, "{head}\r\n\r\n{body}").unwrap();
            }
        });
        url
    }

    /// Lists a folder of a server's bucket.
    fn listed(url: &str, patience: Patience) -> Result<Vec<String>> {
        let builder = AmazonS3Builder::new().with_bucket_name("b").with_endpoint(url);
        let builder = builder.with_allow_http(true).with_skip_signature(true);
        let store = builder.with_retry(no_retries()).build().unwrap();
        let name = Name::parse("s3://b/m").unwrap();
        Place::new(Arc::new(store), &name, Listing::Store, patience).at("m", false).containers()
    }

    #[test]
    fn a_listing_is_asked_for_again() {
        let patience = Patience { pause: Duration::from_millis(1), ..Patience::DEFAULT };
        let url = server(&[(503, ""), (429, ""), (200, LISTED)]);
        assert_eq!(listed(&url, patience).unwrap(), ["x.df11"]);
        let long = Patience { stall: Duration::MAX, pause: Duration::MAX, tries: u32::MAX };
        assert_eq!(listed(&server(&[(200, LISTED)]), long).unwrap(), ["x.df11"]);
        let text = listed(&server(&[(503, "")]), Patience { tries: 0, ..patience }).unwrap_err();
        assert!(text.to_string().contains("s3://b/m: the server answered 503; try"), "{text}");
    }
}
