//! Faults of servers: each is repaired or an error that names the object and the remedy.

use std::{
    fs,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use df11::{Dtype, Error, OpenOptions};

use crate::{
    Fixture,
    container::{Item, Model},
    patient,
    server::{Answer, Server},
};

/// The error of opening, or of reading a tensor of the model.
fn error_of(fixture: &Fixture) -> String {
    let opened = fixture.open();
    let error = match opened {
        Err(error) => error,
        Ok(model) => model.tensor("model.embed_tokens.weight").unwrap().decode::<u8>().unwrap_err(),
    };
    let text = error.to_string();
    assert!(text.contains(&fixture.url()), "{text} names the object");
    assert!(!text.contains("do-not-show"), "{text}");
    text
}

#[track_caller]
fn check(fixture: &Fixture, part: &str) {
    let text = error_of(fixture);
    assert!(text.contains(part), "{part:?} in {text}");
}

#[test]
fn lasting_faults_say_what_to_do() {
    let fixture = Fixture::new();
    let cases = [
        (Answer::Whole, "does not answer requests for ranges"),
        (Answer::Status(403), "renew the credentials"),
        (Answer::Status(401), "renew the credentials"),
        (Answer::Status(400), "renew the credentials"),
        (Answer::Status(404), "check its name"),
        (Answer::Status(416), "the object is empty; upload the container again"),
        (Answer::Status(503), "the server answered 503, 4 times; try again"),
        (Answer::Silent, "did not answer in time, 4 times"),
        (Answer::Cut(0), "try again"),
        (Answer::OtherRange, "another range"),
    ];
    for (answer, part) in cases {
        fixture.server.answer(move |_| answer);
        check(&fixture, part);
    }
}

#[test]
fn a_fault_that_lasts_is_asked_about_once() {
    let fixture = Fixture::new();
    fixture.server.answer(|_| Answer::Status(403));
    check(&fixture, "access is denied");
    assert_eq!(fixture.server.requests().len(), 1);
}

#[test]
fn the_body_of_an_error_is_not_read() {
    let fixture = Fixture::new();
    for (code, part) in [(403, "access is denied"), (503, "the server answered 503, 4 times")] {
        fixture.server.answer(move |_| Answer::Endless(code));
        let start = Instant::now();
        check(&fixture, part);
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn a_changed_object_is_named() {
    let fixture = Fixture::new();
    let model = fixture.open().unwrap();
    for answer in [Answer::Changed, Answer::Status(416)] {
        fixture.server.answer(move |_| answer);
        let error = model.tensors().next().unwrap().decode::<u8>().unwrap_err();
        assert!(matches!(error, Error::Io { .. }));
        let text = error.to_string();
        let wanted = "the object was changed since it was opened; open it again";
        assert!(text.contains(wanted) && text.contains(&fixture.url()), "{text}");
    }
}

#[test]
fn damage_on_the_way_is_noticed() {
    let fixture = Fixture::new();
    let model = fixture.open().unwrap();
    fixture.server.answer(|_| Answer::Damaged(500));
    let error = model.tensors().next().unwrap().decode::<u8>().unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
}

#[test]
fn a_broken_answer_goes_on_where_it_broke() {
    let fixture = Fixture::new();
    let model = fixture.open().unwrap();
    let near = fixture.local.tensor("model.embed_tokens.weight").unwrap();
    let half = near.stored_bytes() / 2;
    fixture.server.requests();
    fixture.server.answer(move |request| {
        if request.number == 0 { Answer::Cut(half as usize) } else { Answer::Right }
    });
    let far = model.tensor(near.name()).unwrap();
    assert_eq!(far.decode::<u8>().unwrap(), near.decode::<u8>().unwrap());
    let requests = fixture.server.requests();
    let [first, second, ..] = &requests[..] else { panic!("{requests:?}") };
    let (first, second) = (first.range.clone().unwrap(), second.range.clone().unwrap());
    assert_eq!((second.start, second.end), (first.start + half, first.end));
}

#[test]
fn a_signed_url_is_never_told() {
    let fixture = Fixture::new();
    let host = fixture.url();
    let host = host.strip_prefix("http://").unwrap();
    let signed = format!("http://user:pass-word@{host}?X-Amz-Signature=sig-nature");
    let model = patient().open(&signed).unwrap();
    fixture.server.answer(|_| Answer::Status(403));
    let reading = model.tensors().next().unwrap().decode::<u8>().unwrap_err();
    let opening = patient().open(&signed).unwrap_err();
    fixture.server.answer(|_| Answer::Cut(3));
    let cut = patient().open(&signed).unwrap_err();
    for error in [reading, opening, cut] {
        let text = format!("{error} {error:?} {model:?}");
        assert!(text.contains("/m/x.df11"), "{text}");
        assert!(!text.contains("sig-nature") && !text.contains("pass-word"), "{text}");
    }
}

#[test]
fn user_and_password_are_sent_and_never_told() {
    let fixture = Fixture::new();
    let url = fixture.url().replace("http://", "http://us%40er:pass%2Fword@");
    patient().open(&url).unwrap();
    let requests = fixture.server.requests();
    // printf 'us@er:pass/word' | base64
    let login = Some("Basic dXNAZXI6cGFzcy93b3Jk".to_owned());
    assert!(!requests.is_empty() && requests.iter().all(|request| request.login == login));
    patient().open(fixture.url()).unwrap();
    assert!(fixture.server.requests().iter().all(|request| request.login.is_none()));
    fixture.server.answer(|_| Answer::Status(401));
    let text = format!("{0} {0:?}", patient().open(&url).unwrap_err());
    assert!(text.contains("renew the credentials") && text.contains(&fixture.url()), "{text}");
    let secrets = ["pass", "us%40er", "us@er", "dXNAZXI6cGFzcy93b3Jk"];
    assert!(!secrets.iter().any(|secret| text.contains(secret)), "{text}");
    let unescaped = patient().open("https://user:pass/word@host/x.df11").unwrap_err().to_string();
    assert!(unescaped.contains("%2F") && !unescaped.contains("word@"), "{unescaped}");
}

#[test]
fn a_folder_prints_no_password() {
    let bytes = Fixture::new().bytes;
    let server = Server::new([("m/model.df11".to_owned(), bytes)].into());
    let url = server.url("m").replace("http://", "http://user:pass-word@");
    let text = format!("{:?}", patient().open(url).unwrap());
    assert!(text.contains("/m\"") && !text.contains("pass-word"), "{text}");
}

#[test]
fn nobody_listens() {
    // A port that was just free.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/x.df11", listener.local_addr().unwrap());
    drop(listener);
    let text = patient().open(&url).unwrap_err().to_string();
    assert!(text.contains(&url) && text.contains("the connection failed"), "{text}");
}

/// The answer to a request of a seeded run: a third of them are faults.
fn seeded(seed: u64, number: usize) -> Answer {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes()).update(&number.to_le_bytes());
    let bytes = hasher.finalize();
    let at = usize::from(bytes.as_bytes()[1]) * 37;
    match bytes.as_bytes()[0] % 30 {
        0 => Answer::Status(500),
        1 => Answer::Status(429),
        2 => Answer::Cut(at),
        3 => Answer::Cut(50 * at),
        4 => Answer::Length(1 + at.cast_signed()),
        5 => Answer::Length(-1 - at.cast_signed()),
        6 => Answer::OtherRange,
        7 => Answer::Damaged(at),
        8 => Answer::Slow(20_000 + at),
        9 if at.is_multiple_of(4) => Answer::Silent,
        10 if at.is_multiple_of(8) => Answer::Changed,
        11 if at.is_multiple_of(8) => Answer::Status(403),
        12 if at.is_multiple_of(8) => Answer::Whole,
        _ => Answer::Right,
    }
}

/// At least 1,000 faults in all; every run ends soon, with the right bytes or a typed error.
#[test]
fn a_thousand_faults_give_no_wrong_byte() {
    const RUNS: u64 = 400;
    const LONGEST: Duration = Duration::from_secs(60);
    let (faults, next) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (right, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let fixture = Fixture::new();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed) as u64;
                    if seed >= RUNS {
                        return;
                    }
                    fixture.server.answer(move |request| seeded(seed, request.number));
                    let start = Instant::now();
                    match run(&fixture, seed) {
                        Ok(()) => right.fetch_add(1, Ordering::Relaxed),
                        Err(error) => {
                            let text = error.to_string();
                            assert!(text.contains(&fixture.url()), "{text}");
                            assert!(text.contains(';'), "no remedy: {text}");
                            refused.fetch_add(1, Ordering::Relaxed)
                        }
                    };
                    assert!(start.elapsed() < LONGEST, "seed {seed}");
                    let count = fixture.server.requests().len();
                    let bad = (0..count).filter(|&at| seeded(seed, at) != Answer::Right).count();
                    faults.fetch_add(bad, Ordering::Relaxed);
                }
            });
        }
    });
    let (faults, right) = (faults.into_inner(), right.into_inner());
    println!("{faults} faults: {right} runs right, {} refused", refused.into_inner());
    assert!(faults >= 1000 && right >= 100, "{faults} {right}");
}

/// Opens and decodes all tensors, whole or sliced; the bytes must be those of the file.
fn run(fixture: &Fixture, seed: u64) -> df11::Result<()> {
    let options: OpenOptions = patient().in_memory(seed.is_multiple_of(5));
    let model = options.open(fixture.url())?;
    for (far, near) in model.tensors().zip(fixture.local.tensors()) {
        let rows = near.shape().first().copied().filter(|_| seed.is_multiple_of(2));
        let ranges: Vec<_> = rows.into_iter().map(|rows| rows / 3..rows).collect();
        let found = far.slice(&ranges)?.decode::<u8>()?;
        assert!(found == near.slice(&ranges)?.decode::<u8>()?, "seed {seed}: {}", far.name());
    }
    Ok(())
}

/// A container that four requests bring to memory. Its directory comes without a fault.
#[test]
fn faults_of_whole_containers_give_no_wrong_byte() {
    const PIECE: usize = 4 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.df11");
    let mut data = vec![0; 3 * PIECE + 1000];
    blake3::Hasher::new().finalize_xof().fill(&mut data);
    let items = [Item::raw("w", Dtype::U8, &[data.len() as u64], data.clone())];
    fs::write(&path, Model::new(&items, &[]).build()).unwrap();
    let fixture = Fixture::of(folder, &path);
    let faults = [
        Answer::Right,
        Answer::Cut(PIECE / 3),
        Answer::Cut(0),
        Answer::Length(-(2 << 20)),
        Answer::Length(1000),
        Answer::OtherRange,
        Answer::Status(500),
        Answer::Damaged(PIECE / 2),
        Answer::Changed,
    ];
    let mut right = 0;
    for (seed, &fault) in faults.iter().enumerate() {
        // Each second request of the container's bytes fails, or all of them.
        fixture.server.answer(move |request| {
            let is_faulty = request.number > 1 && (request.number.is_multiple_of(2) || seed > 6);
            if is_faulty { fault } else { Answer::Right }
        });
        fixture.server.requests();
        let opened = patient().in_memory(true).open(fixture.url());
        match opened.and_then(|model| model.tensor("w").unwrap().decode::<u8>()) {
            Ok(found) => {
                assert!(found == data, "{fault:?}");
                right += 1;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(&fixture.url()) && text.contains(';'), "{text}");
                assert!(seed > 6, "{fault:?}: {text}");
            }
        }
    }
    assert_eq!(right, 7);
}
