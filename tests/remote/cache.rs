//! Chunks on a local disk: read instead of the network, checked, bounded, shared by processes.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process,
    time::SystemTime,
};

use df11::{Dtype, OpenOptions};

use crate::{
    Fixture,
    container::{Item, Model, normal_weights},
    files::files,
    patient,
    reads::large,
    server::{Answer, Server},
};

const CHUNK: u64 = 1 << 20;

fn cached(folder: &Path) -> OpenOptions {
    patient().cache(folder, 1 << 30)
}

/// Decodes all tensors, and compares them with those on the disk.
fn read(fixture: &Fixture, options: &OpenOptions) {
    let model = options.open(fixture.url()).unwrap();
    for (far, near) in model.tensors().zip(fixture.local.tensors()) {
        assert_eq!(far.decode::<u8>().unwrap(), near.decode::<u8>().unwrap(), "{}", far.name());
    }
}

/// The chunks that a cache has, by their paths. Besides them it has locks alone, without bytes, and
/// files of threads that fill it at this moment.
fn chunks(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let models = fs::read_dir(folder).unwrap().map(|model| model.unwrap().path());
    let all = models.filter(|model| model.file_name().is_some_and(|name| name.len() == 64));
    let all = all.flat_map(|model| fs::read_dir(model).unwrap());
    let named = all.map(|entry| {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path))
    });
    let (chunks, others): (Vec<_>, Vec<_>) =
        named.partition(|(name, _)| Path::new(name).extension() == Some("chunk".as_ref()));
    for (name, bytes) in others {
        let ending = name.rsplit('.').next();
        let is_lock = ending == Some("lock") && bytes.is_ok_and(|bytes| bytes.is_empty());
        assert!(is_lock || ending == Some("part"), "{name}");
    }
    // One that goes meanwhile is none.
    chunks.into_iter().filter_map(|(name, bytes)| Some((name, bytes.ok()?))).collect()
}

/// Bytes that the server sent since it was last asked.
fn sent(server: &Server) -> u64 {
    server.requests().iter().map(|request| request.sent).sum()
}

#[test]
fn a_second_run_fetches_the_directory_alone() {
    let (place, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = place.path().join("large.df11");
    fs::write(&path, large()).unwrap();
    let fixture = Fixture::of(place, &path);
    fixture.open().unwrap();
    let opening = sent(&fixture.server);
    let options = cached(folder.path());
    read(&fixture, &options);
    assert!(sent(&fixture.server) > fixture.bytes.len() as u64 / 2);
    for options in [options.clone(), options.in_memory(true)] {
        read(&fixture, &options);
        // Whole containers have bytes between their sections too.
        let more = sent(&fixture.server) - opening;
        assert!(more < opening + (256 << 10), "{more}");
    }
    assert!(!chunks(folder.path()).is_empty());
}

#[test]
fn whole_containers_fill_the_cache_too() {
    let (fixture, folder) = (Fixture::new(), tempfile::tempdir().unwrap());
    // Calls of Windows take no paths of more than 260 characters as they are.
    let deep = ["d", "e", "f"].map(|name| name.repeat(100)).iter().collect::<PathBuf>();
    let options = cached(&folder.path().join(deep));
    read(&fixture, &options.clone().in_memory(true));
    fixture.server.requests();
    fixture.server.answer(|request| {
        // The directory, and nothing else.
        if request.number < 2 { Answer::Right } else { Answer::Status(403) }
    });
    read(&fixture, &options);
}

#[test]
fn damaged_chunks_are_fetched_again() {
    let (fixture, folder) = (Fixture::new(), tempfile::tempdir().unwrap());
    let options = cached(folder.path());
    read(&fixture, &options);
    let whole = chunks(folder.path());
    for (at, path) in whole.keys().enumerate() {
        let (path, mut bytes) = (folder.path().join(path), whole[path].clone());
        match at % 3 {
            0 => bytes.truncate(bytes.len() / 2),
            1 => bytes.push(0),
            _ => bytes[0] ^= 1,
        }
        fs::write(path, bytes).unwrap();
    }
    read(&fixture, &options);
    assert!(sent(&fixture.server) > 0);
    assert_eq!(chunks(folder.path()), whole);
    // A folder in the place of a file: the bytes come from the network.
    let first = folder.path().join(whole.keys().next().unwrap());
    fs::remove_file(&first).unwrap();
    fs::create_dir(&first).unwrap();
    read(&fixture, &options);
}

#[test]
fn what_was_used_longest_ago_goes_first() {
    let folder = tempfile::tempdir().unwrap();
    let weights = |seed| normal_weights(1024 * 768, seed);
    let item = |at| Item::raw(&format!("t{at:02}"), Dtype::BF16, &[1024, 768], weights(at));
    let items: Vec<_> = (0..12).map(item).collect();
    let bytes = Model::new(&items, &[]).build();
    let server = Server::new([("m/x.df11".to_owned(), bytes)].into());
    let most = 8 * CHUNK;
    let options = patient().cache(folder.path(), most);
    let size = || chunks(folder.path()).values().map(Vec::len).sum::<usize>() as u64;
    let model = options.open(server.url("m/x.df11")).unwrap();
    for tensor in model.tensors() {
        tensor.decode::<u8>().unwrap();
        assert!(size() <= most, "{}", size());
    }
    assert!(size() > most / 2, "{}", size());
    let old = SystemTime::UNIX_EPOCH;
    let all = chunks(folder.path());
    let used = all.keys().next_back().unwrap();
    for path in all.keys().filter(|path| *path != used) {
        let file = fs::File::options().append(true).open(folder.path().join(path)).unwrap();
        file.set_modified(old).unwrap();
    }
    patient().cache(folder.path(), 2 * CHUNK).open(server.url("m/x.df11")).unwrap();
    assert!(size() <= 2 * CHUNK && folder.path().join(used).exists());
    let none = patient().cache(folder.path().join("a/b"), 0);
    none.open(server.url("m/x.df11")).unwrap().tensors().next().unwrap().decode::<u8>().unwrap();
    assert!(chunks(&folder.path().join("a/b")).is_empty());
}

/// A store that claims another model's identity and checksums gives it no chunks, and files of
/// others in the folder of a cache stay.
#[test]
fn chunks_are_of_one_name_and_others_files_stay() {
    let folder = tempfile::tempdir().unwrap();
    let mine = folder.path().join("mine");
    fs::create_dir(&mine).unwrap();
    fs::write(mine.join("x.chunk"), vec![0; 3 << 20]).unwrap();
    let bytes = Model::new(&[Item::raw("t", Dtype::U8, &[9], vec![7; 9])], &[]).build();
    let both = ["a/x.df11", "b/x.df11"].map(|path| (path.to_owned(), bytes.clone()));
    let server = Server::new(both.into());
    let options = patient().cache(folder.path(), 1 << 20);
    for name in ["a/x.df11", "b/x.df11"] {
        let model = options.open(server.url(name)).unwrap();
        server.requests();
        assert_eq!(model.tensor("t").unwrap().decode::<u8>().unwrap(), [7; 9]);
        assert!(sent(&server) > 0, "{name} was read from the cache");
    }
    assert_eq!(fs::metadata(mine.join("x.chunk")).unwrap().len(), 3 << 20);
}

/// Eight ranks of a host: each chunk comes over the network once.
#[test]
fn eight_processes_fetch_each_chunk_once() {
    let (place, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let weights = normal_weights(20 << 20, 3);
    let item = |name| Item::tile(name, &[20 << 10, 1 << 10], weights.clone(), (256, 1 << 10));
    let path = place.path().join("x.df11");
    fs::write(&path, Model::new(&[item("a"), item("b")], &[]).build()).unwrap();
    let fixture = Fixture::of(place, &path);
    let shard = &fixture.local.shards()[0];
    let sections = shard.directory().sections.iter();
    let stored: u64 = sections.map(|section| section.length.get()).sum();
    let directory = shard.directory_range().start;
    assert!(stored > 48 * CHUNK);
    let start = |rank: usize| {
        let mut command = process::Command::new(env!("CARGO_BIN_EXE_df11"));
        command.args(["decompress", &fixture.url(), "--cache", "cache", "-o"]);
        command.arg(format!("{rank}")).current_dir(folder.path());
        command.stdout(process::Stdio::null()).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..8).map(start).collect();
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
    let requests = fixture.server.requests();
    let places = requests.iter().map(|request| request.range.clone().unwrap());
    let mut of_chunks: Vec<_> =
        places.filter(|place| place.start >= 4096 && place.start < directory).collect();
    of_chunks.sort_by_key(|place| place.start);
    println!("{} requests for {stored} bytes: {of_chunks:?}", of_chunks.len());
    let twice = of_chunks.windows(2).find(|pair| pair[0].end > pair[1].start);
    assert_eq!(twice, None);
    let sent: u64 = of_chunks.iter().map(|place| place.end - place.start).sum();
    // Bytes between sections come with their neighbours.
    assert!((stored..stored + (64 << 10)).contains(&sent), "{sent} of {stored}");
    let restored = files(&folder.path().join("0"));
    for rank in 1..8 {
        assert!(files(&folder.path().join(rank.to_string())) == restored, "{rank}");
    }
    assert!(!restored.is_empty());
}

#[test]
fn many_readers_share_a_cache() {
    let (fixture, folder) = (Fixture::new(), tempfile::tempdir().unwrap());
    std::thread::scope(|scope| {
        for reader in 0..6 {
            let (fixture, folder) = (&fixture, &folder);
            scope.spawn(move || {
                for _ in 0..5 {
                    // Some have room for a part of it.
                    let most = if reader % 2 == 0 { 1 << 30 } else { 200 << 10 };
                    read(fixture, &patient().cache(folder.path(), most));
                }
            });
        }
    });
    assert!(!chunks(folder.path()).is_empty());
}

#[test]
fn a_folder_that_cannot_be_is_named() {
    let (fixture, folder) = (Fixture::new(), tempfile::tempdir().unwrap());
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let text = cached(&file).open(fixture.url()).unwrap_err().to_string();
    assert!(text.contains(file.to_str().unwrap()), "{text}");
}
