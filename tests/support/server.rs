//! An HTTP server on the loopback, with faults: what each request is answered is the test's choice.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write},
    net::{TcpListener, TcpStream},
    ops::Range,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The bytes that were asked for.
    Right,
    /// A status alone.
    Status(u16),
    /// A status, and a body that does not end.
    Endless(u16),
    /// The connection ends after so many bytes of the body.
    Cut(usize),
    /// Nothing for some time, and then the end of the connection.
    Silent,
    /// The bytes that were asked for, after some time.
    Late(Duration),
    /// The body in parts of so many bytes, with pauses.
    Slow(usize),
    /// A length that is too small or too large by so many bytes, with a body to match.
    Length(isize),
    /// A range other than the one asked for.
    OtherRange,
    /// The body with a byte changed.
    Damaged(usize),
    /// Another ETag.
    Changed,
    /// All of the file with status 200, as from a server that knows no ranges.
    Whole,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// From 0 on.
    pub(crate) number: usize,
    pub(crate) path: String,
    pub(crate) range: Option<Range<u64>>,
    /// The header `Authorization`.
    pub(crate) login: Option<String>,
    /// Bytes of the body that was sent.
    pub(crate) sent: u64,
}

type Choose = dyn Fn(&Request) -> Answer + Send + Sync;

struct State {
    files: BTreeMap<String, Vec<u8>>,
    requests: Mutex<Vec<Request>>,
    choose: Mutex<Arc<Choose>>,
}

/// A running server; it ends with the process.
pub(crate) struct Server {
    state: Arc<State>,
    address: String,
}

impl Server {
    /// Serves files, each by its path.
    pub(crate) fn new(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let choose: Arc<Choose> = Arc::new(|_| Answer::Right);
        let state = State { files, requests: Mutex::default(), choose: Mutex::new(choose) };
        let state = Arc::new(state);
        let serving = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&serving);
                thread::spawn(move || while serve(&state, &stream).is_some() {});
            }
        });
        Self { state, address }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }

    /// From now on.
    pub(crate) fn answer(&self, choose: impl Fn(&Request) -> Answer + Send + Sync + 'static) {
        *self.state.choose.lock().unwrap() = Arc::new(choose);
    }

    /// The requests since this was last asked.
    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.requests.lock().unwrap())
    }
}

/// Answers one request; None if no other can follow on the connection.
fn serve(state: &State, stream: &TcpStream) -> Option<()> {
    let mut request = read_request(stream)?;
    let choose = Arc::clone(&state.choose.lock().unwrap());
    {
        let mut requests = state.requests.lock().unwrap();
        request.number = requests.len();
        requests.push(request.clone());
    }
    let answer = choose(&request);
    let Some(file) = state.files.get(&request.path) else { return status(stream, 404) };
    let (sent, goes_on) = send(stream, file, request.range.clone(), answer);
    if let Some(told) = state.requests.lock().unwrap().get_mut(request.number) {
        told.sent = sent;
    }
    goes_on
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let path = first.split(' ').nth(1)?.trim_start_matches('/');
    let path = path.split('?').next()?.to_owned();
    let mut request = Request { number: 0, path, range: None, login: None, sent: 0 };
    for line in lines {
        let line = line.ok()?;
        if line.is_empty() {
            return Some(request);
        }
        let (name, value) = line.split_once(": ")?;
        if name.eq_ignore_ascii_case("authorization") {
            request.login = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case("range") {
            let (start, end) = value.strip_prefix("bytes=")?.split_once('-')?;
            request.range = Some(start.parse().ok()?..end.parse::<u64>().ok()? + 1);
        }
    }
    None
}

fn status(mut stream: &TcpStream, status: u16) -> Option<()> {
    let body = "<Secret>do-not-show</Secret>";
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}", body.len()).ok()
}

/// Sends a body until the other end closes; its bytes.
fn endless(mut stream: &TcpStream, status: u16) -> u64 {
    let (mut sent, part) = (0, vec![b'x'; 1 << 16]);
    let _ = write!(stream, "HTTP/1.1 {status} X\r\nConnection: close\r\n\r\n");
    while stream.write_all(&part).is_ok() {
        sent += part.len() as u64;
    }
    sent
}

/// Sends a body; its bytes, and whether the connection is of use afterwards.
fn send(
    mut stream: &TcpStream,
    file: &[u8],
    range: Option<Range<u64>>,
    answer: Answer,
) -> (u64, Option<()>) {
    let all = 0..file.len() as u64;
    let whole = range.is_none() || answer == Answer::Whole;
    let mut range = range.filter(|_| !whole).unwrap_or(all.clone());
    range.end = range.end.min(all.end);
    match answer {
        Answer::Status(code) => return (0, status(stream, code)),
        Answer::Endless(code) => return (endless(stream, code), None),
        Answer::Silent => {
            thread::sleep(Duration::from_millis(600));
            return (0, None);
        }
        Answer::Late(time) => thread::sleep(time),
        Answer::OtherRange if range.end < all.end => range = range.start + 1..range.end + 1,
        _ => {}
    }
    let mut body = file[range.start as usize..range.end as usize].to_vec();
    let tag = if answer == Answer::Changed { "other" } else { "first" };
    match answer {
        Answer::Length(by) => body.resize(body.len().saturating_add_signed(by), 0),
        Answer::Damaged(at) => {
            let at = at % body.len().max(1);
            if let Some(byte) = body.get_mut(at) {
                *byte ^= 1;
            }
        }
        _ => {}
    }
    let (code, length) = (if whole { 200 } else { 206 }, body.len());
    let (start, last, size) = (range.start, range.end.saturating_sub(1), file.len());
    let sent = write!(
        stream,
        "HTTP/1.1 {code} X\r\nContent-Length: {length}\r\nETag: \"{tag}\"\r\n\
         Content-Range: bytes {start}-{last}/{size}\r\n\r\n"
    );
    if sent.is_err() {
        return (0, None);
    }
    match answer {
        Answer::Cut(at) => {
            let _ = stream.write_all(&body[..at.min(length)]);
            (at as u64, None)
        }
        Answer::Slow(each) => {
            for part in body.chunks(each.max(1)) {
                if stream.write_all(part).is_err() {
                    return (0, None);
                }
                thread::sleep(Duration::from_millis(20));
            }
            (length as u64, Some(()))
        }
        _ => (length as u64, stream.write_all(&body).ok()),
    }
}
