//! Requests and bytes: opening takes few, reading those that are wanted.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use df11::{Dtype, Level, OpenOptions};

use crate::{
    Fixture,
    container::{Item, Model, Tensor},
    patient,
    server::{Answer, Server},
};

const CHUNK: u64 = 1 << 20;

#[test]
fn opening_takes_two_requests_and_no_tensor() {
    let fixture = Fixture::new();
    // With the patience of users: on a busy machine an answer takes longer than `patient` waits.
    let model = df11::open(fixture.url()).unwrap();
    let requests = fixture.server.requests();
    assert_eq!(requests.len(), 2, "{requests:?}");
    let tail = fixture.bytes.len() as u64 - model.shards()[0].directory_range().start;
    assert_eq!(requests.iter().map(|request| request.sent).sum::<u64>(), 4096 + tail);
    assert_eq!(model.identity(), fixture.local.identity());
}

/// A container of many tensors without bytes.
fn many_tensors(count: usize) -> Vec<u8> {
    let mut model = Model::new(&[Item::raw("w", Dtype::U8, &[0], vec![])], &[]);
    let stored = model.tensors[0].clone();
    let name = |at: usize| format!("model.layers.{:05}.experts.{:03}.weight", at / 100, at % 100);
    model.tensors =
        (0..count).map(|at| Tensor { name: name(at).into(), ..stored.clone() }).collect();
    model.build()
}

#[test]
fn opening_100_000_tensors_takes_their_directory() {
    let bytes = many_tensors(100_000);
    let length = bytes.len() as u64;
    let server = Server::new(BTreeMap::from([("many.df11".to_owned(), bytes)]));
    let model = df11::open(server.url("many.df11")).unwrap();
    assert_eq!(model.tensors().count(), 100_000);
    let requests = server.requests();
    let sent: u64 = requests.iter().map(|request| request.sent).sum();
    let tail = length - model.shards()[0].directory_range().start;
    println!("{} requests, {sent} bytes, of which {tail} of the directory", requests.len());
    assert!(requests.len() <= 3 && sent == 4096 + tail, "{requests:?}");
}

#[test]
fn tensors_slices_and_blocks_are_those_of_the_file() {
    let fixture = Fixture::new();
    let model = fixture.open().unwrap();
    for (far, near) in model.tensors().zip(fixture.local.tensors()) {
        assert_eq!(far.decode::<u8>().unwrap(), near.decode::<u8>().unwrap(), "{}", far.name());
        let rows = far.shape().first().map_or(1, |rows| rows / 2);
        let (far, near) = (far.slice(&[0..rows]).unwrap(), near.slice(&[0..rows]).unwrap());
        assert_eq!(far.decode::<u8>().unwrap(), near.decode::<u8>().unwrap());
    }
    for (far, near) in model.blocks().zip(fixture.local.blocks()) {
        let layout = near.layout().unwrap();
        let mut both = [vec![1; layout.bytes as usize], vec![2; layout.bytes as usize]];
        far.decode_into(&mut both[0]).unwrap();
        near.decode_into(&mut both[1]).unwrap();
        assert_eq!(both[0], both[1], "{}", far.name());
    }
}

/// A container with matrices of some MiB, which are several chunks.
pub(crate) fn large() -> Vec<u8> {
    let weights = crate::container::normal_weights(3 << 20, 5);
    let names = ["a.0.w", "a.1.w", "a.2.w"];
    let items: Vec<_> = names
        .iter()
        .map(|name| Item::tile(name, &[3 << 10, 1 << 10], weights.clone(), (256, 1 << 10)))
        .collect();
    Model::new(&items, &[]).build()
}

#[test]
fn one_tensor_costs_its_chunks() {
    let bytes = large();
    let local =
        OpenOptions::new().open_readers(vec![("x".into(), Box::new(bytes.clone()))]).unwrap();
    let server = Server::new(BTreeMap::from([("x.df11".to_owned(), bytes)]));
    let model = patient().open(server.url("x.df11")).unwrap();
    server.requests();
    let name = "a.1.w";
    let (far, near) = (model.tensor(name).unwrap(), local.tensor(name).unwrap());
    assert_eq!(far.decode::<u8>().unwrap(), near.decode::<u8>().unwrap());
    let requests = server.requests();
    let sent: u64 = requests.iter().map(|request| request.sent).sum();
    // Each of its four arrays can begin and end within a chunk.
    assert!(sent <= far.stored_bytes() + 8 * CHUNK, "{sent}");
    assert!(requests.len() <= 4, "{requests:?}");
    // Once more: chunks that came last are kept.
    let rows = far.slice(&[0..32]).unwrap();
    assert_eq!(rows.decode::<u8>().unwrap()[..], near.decode::<u8>().unwrap()[..32 << 11]);
    let sent: u64 = server.requests().iter().map(|request| request.sent).sum();
    assert!(sent < CHUNK, "{sent}");
}

#[test]
fn verification_fetches_every_byte_about_once() {
    let bytes = large();
    let length = bytes.len() as u64;
    let server = Server::new(BTreeMap::from([("x.df11".to_owned(), bytes)]));
    let model = patient().open(server.url("x.df11")).unwrap();
    server.requests();
    for level in [Level::Structure, Level::Checksums, Level::Full] {
        let found = model.verify(level, &()).unwrap();
        let requests = server.requests();
        let sent: u64 = requests.iter().map(|request| request.sent).sum();
        println!("{level:?}: {} requests, {sent} of {length} bytes", requests.len());
        assert!(level == Level::Structure || sent <= length + length / 10, "{level:?} {sent}");
        assert_eq!(found.tensors, if level == Level::Full { 3 } else { 0 });
    }
}

#[test]
fn a_container_in_memory_is_mapped() {
    let fixture = Fixture::new();
    let model = patient().in_memory(true).open(fixture.url()).unwrap();
    assert_eq!(model.shards()[0].mapping().unwrap().unwrap(), fixture.bytes);
    fixture.server.answer(|_| Answer::Status(500));
    model.verify(Level::Full, &()).unwrap();
}

/// Its first and its last rows are read while those between them are on their way.
#[test]
fn a_container_is_read_while_it_comes() {
    const EACH: usize = 48 << 20;
    let item = |name, byte| Item::raw(name, Dtype::U8, &[EACH as u64], vec![byte; EACH]);
    let names = ["a", "b"];
    let bytes = Model::new(&[item("a", 1), item("b", 2)], &[]).build();
    let size = bytes.len() as u64;
    let server = Server::new([("x.df11".to_owned(), bytes)].into());
    let (waits, last) = (Arc::new(AtomicBool::new(true)), size - (17 << 20));
    let held = Arc::clone(&waits);
    server.answer(move |request| {
        let start = request.range.as_ref().map_or(0, |range| range.start);
        while (EACH as u64 / 2..last).contains(&start) && held.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Answer::Right
    });
    let model = OpenOptions::new().in_memory(true).open(server.url("x.df11")).unwrap();
    let rows = |name, rows| model.tensor(name).unwrap().slice(&[rows]).unwrap().decode::<u8>();
    let all = EACH as u64;
    assert_eq!(rows(names[0], 5..9).unwrap(), [1; 4]);
    assert_eq!(rows(names[1], all - 4..all).unwrap(), [2; 4]);
    let shard = &model.shards()[0];
    assert!(shard.is_coming());
    waits.store(false, Ordering::Relaxed);
    assert_eq!(shard.mapping().unwrap().unwrap().len() as u64, size);
    assert!(!shard.is_coming());
    assert!(rows(names[0], 0..all).unwrap() == vec![1; EACH]);
}

#[test]
fn many_threads_read_at_once() {
    let fixture = Fixture::new();
    let model = Arc::new(fixture.open().unwrap());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for (far, near) in model.tensors().zip(fixture.local.tensors()) {
                    assert_eq!(far.decode::<u8>().unwrap(), near.decode::<u8>().unwrap());
                }
            });
        }
    });
}
